"""The end of a sweep: its rows, its outcome per arm, the table on the terminal and the figure."""

from typing import Any

from rich.console import Console
from rich.table import Table

from adaecho.records.files import write_json
from adaecho.records.outcome import outcome
from adaecho.search.design import TrialId
from adaecho.search.state import Search, SweepState

Row = dict[str, Any]


def write_outcome(state: SweepState, experiment: str, console: Console) -> None:
    """Write ``trials.json`` and ``outcome.json`` beside the trials, and show them."""
    rows = trial_rows(state, experiment)
    arms = outcome(rows)
    write_json(state.folder / "trials.json", rows)
    write_json(state.folder / "outcome.json", arms)
    console.print()
    console.print(outcome_table(arms, rows))
    for line in [caption(state), *remarks(state)]:
        console.print(line, soft_wrap=True, highlight=False)


def trial_rows(state: SweepState, experiment: str) -> list[Row]:
    """One flat row per trial that has begun, in the order of the design."""
    return [
        _row(search, index, experiment)
        for search in state.searches.values()
        for index in sorted(search.summaries)
    ]


def _row(search: Search, index: int, experiment: str) -> Row:
    config, summary = search.arm.config, search.summaries[index]
    reached = summary.get("to_target") or {}
    point = summary.get("hyperparameters", {})
    return {
        "experiment": experiment,
        "task": config["task"]["name"],
        "arm": search.arm.name,
        "echo_variant": config["echo"]["variant"],
        "echo_factor": config["echo"]["factor"],
        "repeat": search.repeat,
        "index": index,
        "status": summary["status"],
        "counted": index in search.counted(),
        "seed": summary.get("seed"),
        "hyperparameters": {axis.key: point.get(axis.key) for axis in search.arm.axes},
        "target_metric": config["target"]["metric"],
        "target_value": config["target"]["value"],
        **{f"to_target_{key}": reached.get(key) for key in ("fresh_examples", "steps", "train_time_s")},
        "best_value": (summary.get("best") or {}).get("value"),
        **{key: summary.get(key) for key in ("fresh_examples", "steps", "train_time_s")},
    }


def outcome_table(arms: list[Row], rows: list[Row]) -> Table:
    """Per arm: the best trial's cost to the target, its spread, its ratio to the baseline's; what went wrong.

    With several searches per arm the figures are the mean of their best trials and the range of those; with
    one, the best trial, and the range over all its trials that reached the target.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("arm", overflow="fold")
    headings = ("fresh\nexamples", "range", "ratio", "steps", "seconds", "diverged", "missed")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in arms:
        counted = [row for row in rows if row["arm"] == arm["arm"] and row["counted"]]
        spread, ratio = _spread(arm, counted), arm["ratio_to_baseline"]
        table.add_row(
            arm["arm"],
            _mean(arm["fresh_examples"], ",.0f"),
            f"{spread[0]:,}-{spread[1]:,}" if spread else "-",
            f"{ratio:.2f}" if ratio is not None else "-",
            _mean(arm["steps"], ",.0f"),
            _mean(arm["train_time_s"], ".1f"),
            str(arm["diverged"] or "-"),
            str(arm["missed"] or "-"),
        )
    return table


def _spread(arm: Row, rows: list[Row]) -> tuple[int, int] | None:
    if arm["searches"] > 1:
        costs = arm["fresh_examples"]
        return (costs["min"], costs["max"]) if costs else None
    reached = [row["to_target_fresh_examples"] for row in rows if row["to_target_fresh_examples"] is not None]
    return (min(reached), max(reached)) if reached else None


def caption(state: SweepState) -> str:
    """What the columns of the table mean."""
    if state.design.repeats > 1:
        return (
            f"To the target: mean over {state.design.repeats} searches of the best trial of each; "
            "range: of these best trials; ratio: to the baseline's fresh examples."
        )
    return (
        "To the target: the best trial of each arm; range: over the arm's trials that reached it; "
        "ratio: to the baseline's fresh examples."
    )


def _mean(figures: dict[str, float] | None, form: str) -> str:
    return format(figures["mean"], form) if figures else "-"


def remarks(state: SweepState) -> list[str]:
    """What a reader of the table must know: searches that are incomplete, and why."""
    lines = []
    for search in state.searches.values():
        if search.is_complete():
            continue
        name = f"{search.arm.name}/{search.repeat}"
        failed = [index for index in search.missing() if search.status(index) == "failed"]
        if failed:
            trial = TrialId(search.arm.name, search.repeat, failed[0])
            where = state.trial_folder(trial) / "traceback.txt"
            lines.append(f"search {name} is incomplete: {len(failed)} of its trials failed; see {where}")
        elif search.count("diverged") > search.max_diverged:
            lines.append(
                f"search {name} is incomplete: {search.count('diverged')} trials diverged, and "
                f"search.max_diverged={search.max_diverged} were replaced; raise it, or narrow the axes"
            )
    return lines
