"""From run folders to the small tables that are committed under ``results/<experiment>/<task>/``.

::

    trials.json    one row per trial; see ``records.outcome``, and ``records.trials`` for its form
    outcome.json   one dict per arm, computed from the rows
    curves.json    the metric over fresh examples of the best trial of each search
    origin.json    the commands that made the records, the machines and versions they ran on, and a digest
                   of each of the others, which whoever reads them checks: they belong together

``python -m adaecho.records.collect SWEEP --command "..."`` takes a sweep's folder with its ``trials.json``;
``python -m adaecho.records.collect RUN RUN ... --experiment NAME`` takes single runs, each an arm of its own.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaecho.config.identity import identity, run_id
from adaecho.errors import FolderError, say, told
from adaecho.records.files import (
    check_no_link,
    dumps,
    folder_errors,
    read_json,
    record_errors,
    remove_leftovers,
    write_json,
    write_text,
)
from adaecho.records.folder import RunFolder
from adaecho.records.lock import alone
from adaecho.records.outcome import COSTS, TARGET, Row, best_trials, searches
from adaecho.records.status import FINISHED, Status
from adaecho.records.table import summarize
from adaecho.records.trials import TABLES, check_name, digest, read_rows, table_text

# What tells sweeps apart where a row of an earlier version has no run_id.
_SETTINGS = ("seed", "hyperparameters", "echo_variant", "echo_factor", "batch_size", *TARGET)
_ENDED = (*(f"to_target_{cost}" for cost in COSTS), "best_value", *COSTS)
_SPLIT = ("validation_examples", "split_seed")
_EVALUATIONS = ("every_fresh_examples", "max_examples")
_EVALUATED_AT_END = (Status.REACHED, Status.BUDGET_SPENT)
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
        FolderError: ``sweep`` has no ``trials.json``, or a record is missing or damaged, or the tables of
            another sweep lie there.
    """
    check_no_link(sweep / "trials.json")
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
        FolderError: a folder holds no finished run, or two hold the same arm, or others' task, target or
            data, or the tables of other runs lie there.
    """
    rows: list[Row] = []
    alike: dict[Path, dict[str, Any]] = {}
    commands = []
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
        counted = summary["status"] in FINISHED - {Status.DIVERGED}
        rows.append(trial_row(config, summary, experiment=experiment, arm=arm, counted=counted))
        alike[path] = _same_in_all(config, summary)
        commands.append(shlex.join(["python", "-m", "adaecho.run", *run.read_overrides()]))
    _check_alike(alike)
    curves = [_curve(row, path) for row, path in zip(rows, runs, strict=True)]
    return _write(rows, curves, runs, results, commands)


def _same_in_all(config: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """What runs have to share for their costs to be of one task: target, data, its split, model, ..."""
    decides = identity(config)
    data = {f"data.{key}": decides["data"].get(key) for key in _SPLIT}
    task = {f"task.{key}": value for key, value in decides["task"].items()}
    target = {f"target.{key}": decides["target"].get(key) for key in ("metric", "value", "in_a_row")}
    evaluations = {f"evaluate.{key}": decides.get("evaluate", {}).get(key) for key in _EVALUATIONS}
    return {**task, **target, **evaluations, **data, "data": summary.get("data")}


def _check_alike(runs: dict[Path, dict[str, Any]]) -> None:
    first, expected = next(iter(runs.items()))
    for path, found in runs.items():
        for key in {**expected, **found}:
            value, other = found.get(key), expected.get(key)
            if isinstance(value, dict) and isinstance(other, dict):  # what one doesn't know is no difference
                value, other = ({name: one[name] for name in value.keys() & other} for one in (value, other))
            if value != other:
                raise FolderError(
                    f"{path}: its {key} is {value}, and that of {first} is {other}: their costs "
                    "can't be compared; collect runs of one task, target and data"
                )


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
    run = RunFolder(folder)
    metrics = run.read_metrics()
    last = metrics[-1] if metrics else {}
    if row["status"] in _EVALUATED_AT_END and last.get("fresh_examples") != row["fresh_examples"]:
        raise FolderError(
            f"{folder / 'metrics.jsonl'}: ends after {last.get('fresh_examples')} fresh examples, its run "
            f"after {row['fresh_examples']}; restore it, or run the trial again"
        )
    return {
        **{key: row[key] for key in ("arm", "echo_variant", "echo_factor", "repeat", "index")},
        "metric": row["target_metric"],
        "fresh_examples": [line["fresh_examples"] for line in metrics],
        "values": [line[row["target_metric"]] for line in metrics],
        "last": {key: value for key, value in last.items() if not key.endswith("_s")},
    }


def _trial_folder(sweep: Path, row: Row) -> Path:
    folder = sweep
    for name in (check_name("arm", row["arm"]), str(int(row["repeat"])), str(int(row["index"]))):
        folder /= name
        check_no_link(folder)
    return folder


def _write(
    rows: list[Row], curves: list[dict[str, Any]], folders: Sequence[Path], results: Path, commands: list[str]
) -> Path:
    into = results / check_name("experiment", rows[0]["experiment"]) / check_name("task", rows[0]["task"])
    for folder in (into.parent, into):
        check_no_link(folder)
    data = _data(folders)
    _check_same_sweep(into, rows, data.get("data", []))
    _check_same_curves(into, curves)
    texts = {"trials.json": table_text(rows), "outcome.json": one_line_each(summarize(rows))}
    texts |= {"curves.json": one_line_each(curves)} if curves else {}
    write_tables(into, texts, {"commands": commands, "environments": _environments(folders), **data})
    return into


def _check_same_sweep(into: Path, rows: list[Row], data: list[Any]) -> None:
    """Raises FolderError where tables lie that these rows don't hold: of other trials, results, data, ..."""
    if not (into / "trials.json").exists():
        if others := [name for name in TABLES if (into / name).exists()]:
            raise FolderError(
                f"{into}: holds {others[0]} of something else; name another folder by --results"
            )
        return
    trials = {_point(row): row for row in rows}
    for row in read_rows(into / "trials.json"):
        same = trials.get(_point(row), {})
        keys = ("run_id",) if row.get("run_id") else _SETTINGS
        if not same or any(key in row and row[key] != same.get(key) for key in keys):
            raise _other_tables(into, row, f"of seed {row.get('seed')} is none of these")
        read, reads = row.get("fresh_examples") or 0, same.get("fresh_examples") or 0
        if reads < read and (row["status"] in FINISHED or same.get("to_target_fresh_examples") is None):
            raise _other_tables(into, row, f"has read {read} fresh examples, here {reads}")
        # What has ended is never run again, so that it has even its seconds in common.
        is_over = row["status"] in FINISHED and row["status"] == same["status"] and reads == read
        for key in _ENDED if is_over else ("to_target_fresh_examples",):
            if row.get(key) is not None and row[key] != same.get(key):
                raise _other_tables(into, row, f"has {key} {row[key]}, here {same.get(key)}")
    known = read_json(into / "origin.json").get("data") if (into / "origin.json").exists() else None
    if known and data and not any(one in known for one in data):
        raise _other_tables(into, rows[0], "was of other data")


def _check_same_curves(into: Path, curves: list[dict[str, Any]]) -> None:
    """Raises FolderError where these aren't what lies there, gone on with: of another machine's runs."""
    names = ("trials.json", "curves.json")
    if not all((into / name).exists() for name in names):
        return
    rows, lying = (read_rows(into / name) for name in names)
    known = {
        _point(curve): dict(zip(curve["fresh_examples"], curve["values"], strict=True)) for curve in lying
    }
    over = {_point(row): known.get(_point(row), {}) for row in rows if row["status"] in FINISHED}
    for curve in curves:
        before = over.get(_point(curve), {})
        for fresh_examples, value in zip(curve["fresh_examples"], curve["values"], strict=True):
            if (lies := before.get(fresh_examples, value)) != value:
                difference = (
                    f"had {curve['metric']} {lies} after {fresh_examples} fresh examples, here {value}"
                )
                raise _other_tables(into, curve, difference)


def _point(row: Row) -> tuple[Any, ...]:
    return row["arm"], row["repeat"], row["index"]


def _other_tables(into: Path, row: Row, difference: str) -> FolderError:
    return FolderError(
        f"{into}: holds the tables of another sweep, whose trial {row['arm']}/{row['repeat']}/{row['index']} "
        f"{difference}; name another folder by --results, or remove them"
    )


def write_tables(into: Path, texts: dict[str, str], origin: dict[str, Any]) -> None:
    """Write the tables of these texts, by their names, and where they come from; others are removed."""
    with folder_errors(into):
        into.mkdir(parents=True, exist_ok=True)
    digests = {name: digest(text.encode()) for name, text in texts.items()}
    with folder_errors(into), alone(into):
        remove_leftovers(into)
        # First: from here until the last is written, a reader of tables that lay here before refuses them.
        write_json(into / "origin.json", {**origin, "sha256": digests})
        for name in TABLES:
            if name in texts:
                write_text(into / name, texts[name])
            else:
                (into / name).unlink(missing_ok=True)


def _environments(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Where the runs were made, each once; without job ids, which tell a reader nothing."""
    found: list[dict[str, Any]] = []
    for folder in folders:
        RunFolder(folder).check_links()
        latest = read_json(folder / "environment.json")
        for environment in [*latest.pop("earlier", []), latest]:
            environment.pop("slurm", None)
            if environment not in found:
                found.append(environment)
    return found


def _data(folders: Sequence[Path]) -> dict[str, Any]:
    """What the runs knew of their data, each once, e.g. its sha256, and a sample that one generated."""
    summaries = [summary for folder in folders if (summary := RunFolder(folder).read_summary()) is not None]
    found: dict[str, Any] = {}
    for summary in summaries:
        if "data" in summary and summary["data"] not in found.setdefault("data", []):
            found["data"].append(summary["data"])
    samples = [summary["sample"] for summary in summaries if "sample" in summary]
    return {**found, **({"sample": samples[0]} if samples else {})}


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
    with told(), record_errors(", ".join(map(str, options.folders))):
        if options.command is not None:
            into = collect_sweep(options.folders[0], options.results, options.command)
        else:
            into = collect_runs(options.folders, options.results, options.experiment)
        say(into)


if __name__ == "__main__":
    main()
