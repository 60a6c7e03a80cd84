"""Collect the results of a finished sweep into small tables that can be committed.

The module reads the run folders of the sweep and writes these files to ``results/<experiment>/<task>/``::

    trials.json    one row per trial; ``records.outcome`` explains the keys, ``records.trials`` the format
    outcome.json   one dict per arm (compared configuration), computed from the rows
    curves.json    the metric at each evaluation, for the best trial of each search
    origin.json    the command that ran the sweep, and the machines and package versions that were used

Run ``python -m adaecho.records.collect SWEEP --command "..."``, with the command that ran the sweep.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaecho.config.identity import run_id
from adaecho.errors import FolderError, print_line, redact_urls, report_errors
from adaecho.records.files import dumps, folder_errors, read_json, write_json, write_text
from adaecho.records.folder import RunFolder
from adaecho.records.outcome import COSTS, Row, best_trials, searches
from adaecho.records.table import summarize
from adaecho.records.trials import TABLES, read_rows, table_text

_COPIED = ("target_direction", "R", "gain", "gradient_variance", "gradient_square", "scale_invariant_steps")


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
    """Build the table row of one trial (training run). ``records.outcome`` explains its keys.

    Args:
        config: the config of the run as plain dicts.
        summary: the content of the run's ``summary.json``.
        repeat: the index of the search, from 0.
        index: the index of the trial within the search, from 0.
        counted: whether the trial counts in the results; diverged trials do not.
        positions: the position of each searched value in its range, from 0 (lowest) to 1 (highest).
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
        "target_in_a_row": config["target"]["consecutive"],
        **{f"to_target_{cost}": to_target.get(cost) for cost in COSTS},
        "best_value": (summary.get("best") or {}).get("value"),
        **{cost: summary.get(cost) for cost in COSTS},
        "trained_examples": summary.get("steps", 0) * config["batch_size"],
        **{f"final_{metric}": value for metric, value in summary.get("final", {}).items()},
        **{key: summary[key] for key in _COPIED if key in summary},
        **{key: value for key, value in summary.get("data", {}).items() if key == "validation_images"},
    }


def collect_sweep(sweep: Path, results: Path, command: str) -> Path:
    """Write the result tables of a finished sweep, and return the folder that contains them.

    Args:
        sweep: the sweep's folder.
        results: the parent folder; the tables are written to ``<results>/<experiment>/<task>/``.
        command: the command that ran the sweep, which is recorded.

    Raises:
        FolderError: the sweep has not finished, or its arms belong to more than one task.
    """
    if not (sweep / "trials.json").exists():
        raise FolderError(
            f"{sweep}: no trials.json, so this is not a finished sweep; repeat its command to finish it"
        )
    rows: list[Row] = read_rows(sweep / "trials.json")
    tasks = sorted({row["task"] for row in rows})
    if len(tasks) > 1:
        raise FolderError(f"{sweep}: its arms belong to {' and '.join(tasks)}; run one sweep for each task")
    into = results.joinpath(rows[0]["experiment"], tasks[0])
    curves = best_curves(rows, sweep)
    texts = {"trials.json": table_text(rows), "outcome.json": one_line_each(summarize(rows))}
    texts |= {"curves.json": one_line_each(curves)} if curves else {}
    origin = _origin([_trial_folder(sweep, row) for row in rows])
    write_tables(into, texts, {"commands": redact_urls([command]), **origin})
    return into


def best_curves(rows: list[Row], sweep: Path) -> list[dict[str, Any]]:
    """Read the learning curve of the best trial of each search."""
    # If a search has a single trial, its curve is shown even if the trial missed the target.
    single = {key: trials[0] for key, trials in searches(rows).items() if len(trials) == 1}
    shown = {key: row for key, row in single.items() if row["counted"]} | best_trials(rows)
    return [_curve(row, _trial_folder(sweep, row)) for row in shown.values()]


def _curve(row: Row, folder: Path) -> dict[str, Any]:
    metrics = RunFolder(folder).read_metrics()
    last = metrics[-1] if metrics else {}
    return {
        **{key: row[key] for key in ("arm", "echo_variant", "echo_factor", "repeat", "index")},
        "metric": row["target_metric"],
        # one item per evaluation
        "fresh_examples": [line["fresh_examples"] for line in metrics],
        "values": [line[row["target_metric"]] for line in metrics],
        "last": {key: value for key, value in last.items() if not key.endswith("_s")},  # without times
    }


def _trial_folder(sweep: Path, row: Row) -> Path:
    return sweep.joinpath(row["arm"], str(row["repeat"]), str(row["index"]))


def write_tables(into: Path, texts: dict[str, str], origin: dict[str, Any]) -> None:
    """Replace the result tables in a folder, and record in ``origin.json`` how they were produced."""
    # texts has the content of each table, by file name.
    with folder_errors(into):
        into.mkdir(parents=True, exist_ok=True)
        for name in TABLES:
            (into / name).unlink(missing_ok=True)  # so that no old table remains if the process is killed
        write_json(into / "origin.json", origin)
        for name, text in texts.items():
            write_text(into / name, text)


def _origin(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the distinct environments and data facts of the runs, and one generated text."""
    environments, data, samples = list[Any](), list[Any](), list[Any]()
    for folder in folders:
        latest = read_json(folder / "environment.json")
        for environment in [*latest.pop("earlier", []), latest]:
            environment.pop("slurm", None)  # job ids do not help a reader
            if environment not in environments:
                environments.append(environment)
        summary = RunFolder(folder).read_summary() or {}
        if "data" in summary and summary["data"] not in data:
            data.append(summary["data"])
        samples += [summary["sample"]] if "sample" in summary else []
    found = {"data": data, "sample": samples[0] if samples else None}
    return {"environments": environments, **{key: value for key, value in found.items() if value}}


def one_line_each(table: list[Any]) -> str:
    """Format a list as JSON with one item per line, so that diffs are short."""
    return "[\n" + ",\n".join(dumps(item) for item in table) + "\n]\n"


def main(arguments: list[str] | None = None) -> None:
    """Run the command ``python -m adaecho.records.collect``."""
    parser = argparse.ArgumentParser(
        prog="python -m adaecho.records.collect", description="Collect a sweep into committed tables."
    )
    parser.add_argument("folder", type=Path, help="folder of a finished sweep")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the tables")
    parser.add_argument("--command", required=True, help="the command that ran the sweep, to record it")
    options = parser.parse_args(arguments)
    with report_errors():
        print_line(collect_sweep(options.folder, options.results, options.command))


if __name__ == "__main__":
    main()
