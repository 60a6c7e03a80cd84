"""From run folders to the small tables that are committed under ``results/<experiment>/<task>/``.

::

    trials.json    one row per trial; see ``records.outcome``, and ``records.trials`` for its form
    outcome.json   one dict per arm, computed from the rows
    curves.json    the metric over fresh examples of the best trial of each search
    origin.json    the commands that made the records, and the machines and versions they ran on

``python -m adaecho.records.collect SWEEP --command "..."`` takes a sweep's folder with its ``trials.json``;
``python -m adaecho.records.collect RUN RUN ... --experiment NAME`` takes single runs, each an arm of its own.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaecho.config.identity import differences, identity, run_id
from adaecho.errors import FolderError, say, told
from adaecho.masking import masked
from adaecho.records.files import dumps, folder_errors, read_json, write_json, write_text
from adaecho.records.folder import RunFolder
from adaecho.records.outcome import COSTS, Row, best_trials, searches
from adaecho.records.status import FINISHED, Status
from adaecho.records.table import summarize
from adaecho.records.trials import TABLES, read_rows, table_text

_TOLD = ("target_direction", "R", "gain", "gradient_variance", "gradient_square", "scale_invariant_steps")


def trial_row(
    config: dict[str, Any],
    summary: dict[str, Any],
    *,
    experiment: str,
    arm: str,
    repeat: int = 0,
    index: int = 0,
    counted: bool = True,
    positions: dict[str, float] | None = None,
) -> Row:
    """The row of one trial.

    Args:
        config: the run's plain config.
        summary: the run's summary.
        experiment: name of what was compared.
        arm: name of the configuration.
        repeat: which search of the arm.
        index: which point of the search.
        counted: whether it is among the search's budget of non-divergent trials.
        positions: where its point lies on each axis of the search, 0 to 1 by the axis's scale.
    """
    to_target = summary.get("to_target") or {}
    return {
        "experiment": experiment,
        "task": config["task"]["name"],
        "arm": arm,
        "echo_variant": config["echo"]["variant"],
        "echo_factor": config["echo"]["factor"],
        "baseline": config.get("search", {}).get("baselines", {}).get(arm),
        "batch_size": config["batch_size"],
        **{key: config["echo"].get(key, 0) for key in ("shuffle_buffer", "batch_shuffle_buffer")},
        "repeat": repeat,
        "index": index,
        "status": summary["status"],
        "counted": counted,
        "seed": config["seed"],
        "run_id": run_id(config),
        "hyperparameters": summary.get("hyperparameters", {}),
        **({"positions": positions} if positions else {}),
        "target_metric": config["target"]["metric"],
        "target_value": config["target"]["value"],
        "target_in_a_row": config["target"].get("in_a_row", 1),  # records before it had one
        **{f"to_target_{cost}": to_target.get(cost) for cost in COSTS},
        "best_value": (summary.get("best") or {}).get("value"),
        **{cost: summary.get(cost) for cost in COSTS},
        "trained_examples": summary.get("steps", 0) * config["batch_size"],
        **{f"final_{metric}": value for metric, value in summary.get("final", {}).items()},
        **{key: summary[key] for key in _TOLD if key in summary},
        **{key: value for key, value in summary.get("data", {}).items() if key == "validation_images"},
    }


def collect_sweep(sweep: Path, results: Path, command: str) -> Path:
    """Write the tables of a sweep; returns their folder.

    Raises:
        FolderError: ``sweep`` has no ``trials.json``, its arms are of several tasks, or a record is damaged.
    """
    if not (sweep / "trials.json").exists():
        raise FolderError(
            f"{sweep}: no trials.json, so no finished sweep; run its command again to finish it"
        )
    rows: list[Row] = read_rows(sweep / "trials.json")
    tasks = sorted({row["task"] for row in rows})
    if len(tasks) > 1:
        raise FolderError(
            f"{sweep}: its arms are of {' and '.join(tasks)}; a table is of one: run a sweep for each"
        )
    folders = [_trial_folder(sweep, row) for row in rows]
    return _write(rows, best_curves(rows, sweep), folders, results, [command])


def collect_runs(runs: Sequence[Path], results: Path, experiment: str) -> Path:
    """Write the tables of single runs of one task, each an arm named by its echo; returns their folder.

    Raises:
        FolderError: a folder holds no run, or two hold the same arm, or others' task, target or evaluations.
    """
    rows: list[Row] = []
    commands, first = list[str](), dict[str, Any]()
    for path in runs:
        run = RunFolder(path)
        config, summary = run.read_config(), run.read_summary()
        if config is None or summary is None:
            raise FolderError(f"{path}: holds no run (config.yaml and summary.json)")
        echo = config["echo"]
        arm = "baseline" if echo["variant"] == "none" else f"{echo['variant']}_e{echo['factor']}"
        if any(row["arm"] == arm for row in rows):
            raise FolderError(
                f"{path}: a second run of arm {arm}; repeats belong into a sweep (search.repeats)"
            )
        comparable = _what_costs_depend_on(config)
        first = first or comparable
        if differing := differences(first, comparable):
            raise FolderError(
                f"{path}: its costs can't be compared with those of {runs[0]} (in the folder): "
                f"{'; '.join(differing)}"
            )
        counted = summary["status"] in FINISHED - {Status.DIVERGED}
        rows.append(trial_row(config, summary, experiment=experiment, arm=arm, counted=counted))
        commands.append(shlex.join(["python", "-m", "adaecho.run", *run.read_overrides()]))
    curves = [_curve(row, path) for row, path in zip(rows, runs, strict=True)]
    return _write(rows, curves, runs, results, commands)


def _what_costs_depend_on(config: dict[str, Any]) -> dict[str, Any]:
    """What runs have to share for their costs to be of one task."""
    decides = identity(config)
    data = {key: decides["data"].get(key) for key in ("validation_examples", "split_seed")}
    return {**{key: decides.get(key) for key in ("task", "target", "evaluate")}, "data": data}


def best_curves(rows: list[Row], sweep: Path) -> list[dict[str, Any]]:
    """The metric over fresh examples of the best trial of each search, from the run folders of a sweep.

    A search of one trial has its curve where that missed the target, too: nothing was chosen by it.

    Returns:
        Dicts with ``arm``, ``echo_variant``, ``echo_factor``, ``repeat``, ``index``, ``metric``, the lists
        ``fresh_examples`` and ``values``, and all that the ``last`` evaluation found but seconds.
    """
    alone = {key: trials[0] for key, trials in searches(rows).items() if len(trials) == 1}
    shown = {key: row for key, row in alone.items() if row["counted"]} | best_trials(rows)
    return [_curve(row, _trial_folder(sweep, row)) for row in shown.values()]


def _curve(row: Row, folder: Path) -> dict[str, Any]:
    metrics = RunFolder(folder).read_metrics()
    last = metrics[-1] if metrics else {}
    return {
        **{key: row[key] for key in ("arm", "echo_variant", "echo_factor", "repeat", "index")},
        "metric": row["target_metric"],
        "fresh_examples": [line["fresh_examples"] for line in metrics],
        "values": [line[row["target_metric"]] for line in metrics],
        "last": {key: value for key, value in last.items() if not key.endswith("_s")},
    }


def _trial_folder(sweep: Path, row: Row) -> Path:
    return sweep.joinpath(row["arm"], str(row["repeat"]), str(row["index"]))


def _write(
    rows: list[Row], curves: list[dict[str, Any]], folders: Sequence[Path], results: Path, commands: list[str]
) -> Path:
    into = results.joinpath(rows[0]["experiment"], rows[0]["task"])
    texts = {"trials.json": table_text(rows), "outcome.json": one_line_each(summarize(rows))}
    texts |= {"curves.json": one_line_each(curves)} if curves else {}
    write_tables(into, texts, {"commands": masked(commands), **_origin(folders)})
    return into


def write_tables(into: Path, texts: dict[str, str], origin: dict[str, Any]) -> None:
    """Write the tables of these texts, by their names, and where they come from; others are removed."""
    with folder_errors(into):
        into.mkdir(parents=True, exist_ok=True)
        for name in TABLES:
            (into / name).unlink(missing_ok=True)  # a kill leaves no new rows beside old curves
        write_json(into / "origin.json", origin)
        for name, text in texts.items():
            write_text(into / name, text)


def _origin(folders: Sequence[Path]) -> dict[str, Any]:
    """Where the runs were made and what they knew of their data, each once; a sample that one generated."""
    environments, data, samples = list[Any](), list[Any](), list[Any]()
    for folder in folders:
        latest = read_json(folder / "environment.json")
        for environment in [*latest.pop("earlier", []), latest]:
            environment.pop("slurm", None)  # job ids tell a reader nothing
            if environment not in environments:
                environments.append(environment)
        summary = RunFolder(folder).read_summary() or {}
        if "data" in summary and summary["data"] not in data:
            data.append(summary["data"])
        samples += [summary["sample"]] if "sample" in summary else []
    return {
        "environments": environments,
        **({"data": data} if data else {}),
        **({"sample": samples[0]} if samples else {}),
    }


def one_line_each(table: list[Any]) -> str:
    """A JSON list with one item per line: small, and a difference shows which arm changed."""
    return "[\n" + ",\n".join(dumps(item) for item in table) + "\n]\n"


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m adaecho.records.collect", description="Collect run folders into committed tables."
    )
    parser.add_argument("folders", nargs="+", type=Path, help="a sweep's folder, or single runs' folders")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where the tables go")
    parser.add_argument("--command", help="what was typed to make the sweep; kept with its tables")
    parser.add_argument("--experiment", help="name for single runs")
    options = parser.parse_args(arguments)
    if (options.command is None) == (options.experiment is None):
        parser.error("--command for a sweep's folder, or --experiment for single runs")
    if options.command is not None and len(options.folders) > 1:
        parser.error("--command goes with the folder of one sweep")
    with told():
        if options.command is not None:
            say(collect_sweep(options.folders[0], options.results, options.command))
        else:
            say(collect_runs(options.folders, options.results, options.experiment))


if __name__ == "__main__":
    main()
