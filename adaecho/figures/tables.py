"""From the rows of one experiment on one task to its figures: of a committed table or of a sweep's folder."""

import re
from pathlib import Path
from typing import Any

from adaecho.figures.arms import draw_ends, draw_fig3
from adaecho.figures.curves import AS_FIG3, COST, Curve, draw_curves, tuning_curves
from adaecho.figures.lines import Sweep, draw_lines
from adaecho.figures.style import target_words
from adaecho.records.outcome import SETTINGS, Row, arm_of_winner, targets_of, without_target

# The paper's figures that are not bars per arm: what is drawn against what.
LINES = {
    "fig4": Sweep("echo_factor", costs=("train_time_s", "fresh_examples")),
    "fig5": Sweep("echo_factor", lines="batch_size"),
    "fig6": Sweep("batch_size"),
    "fig7a": Sweep("batch_shuffle_buffer"),
    "fig7b": Sweep("shuffle_buffer"),
}

# What an experiment trains on, where its task is named after another data set.
_DATA = {"bccd": "blood cells", "caltech101": "Caltech-101"}
NOT_AUGMENTED = frozenset({"lm1b", "common_crawl", "small_text"})  # tasks of text


def draw_table(
    rows: list[Row], arms: list[Row], curves: list[Curve], into: Path, stem: str, form: str
) -> list[Path]:
    """Draw what the rows and curves of one experiment hold.

    Args:
        rows: at least one; see ``records.outcome``.
        arms: what ``records.table.summarize`` makes of them.
        curves: see ``records.collect``; without any, none are drawn.
        into: folder of the figures.
        stem: beginning of their names.
        form: png, svg or pdf.
    """
    first = rows[0]
    curves = [curve for curve in curves if curve["fresh_examples"]]  # of runs that were evaluated at all
    rows, arms, curves = ([_named(one, first["task"]) for one in table] for table in (rows, arms, curves))
    lines = LINES.get(first["experiment"])
    paths, title = [into / f"{stem}.{form}"], describe(rows)
    if without_target(rows) and (rates := _rates(arms)):
        of_rates = Sweep("learning_rate", lines="method", costs=(f"final_{first['target_metric']}",))
        draw_lines(rates, paths[0], title, of_rates, "Mean over runs; bars: minimum and maximum.")
    elif without_target(rows):
        draw_ends(arms, paths[0], title, first["target_metric"])
    elif lines is None:
        draw_fig3(arms, paths[0], title)
    else:
        draw_lines(arms, paths[0], title, lines)
    over = "; mean and standard deviation" if len({row["repeat"] for row in rows}) > 1 else ""
    if curves:
        paths.append(into / f"{stem}_curves.{form}")
        which = "best trial of each search" if any(row["index"] for row in rows) else "every run"
        whose = f"{_name(first)}: {which}{over}"
        of_arms = {row["arm"]: {key: row.get(key) for key in SETTINGS} for row in rows}
        with_settings = [of_arms[one["arm"]] | one | {"arm": arm_of_winner(one["arm"])} for one in curves]
        target = first["target_value"] if len(targets_of(rows)) == 1 else None
        draw_curves(with_settings, paths[1], whose, first["target_metric"], target, lines or AS_FIG3)
    if tuned := tuning_curves(rows):
        paths.append(into / f"{stem}_tuning.{form}")
        draw_curves(
            tuned, paths[-1], f"{_name(first)}: the best trial so far{over}", COST, None, lines or AS_FIG3
        )
    return paths


def _named(one: Row, task: str) -> Row:
    """A row or curve with the name that its echo variant has in this task."""
    is_example = one["echo_variant"] in ("example_before_augmentation", "example_after_augmentation")
    return {**one, "echo_variant": "example"} if is_example and task in NOT_AUGMENTED else one


def _rates(arms: list[Row]) -> list[Row]:
    """The arms with their learning rates, where each arm's name ends in one (``e2_lr0.05``); else none."""
    found = [re.fullmatch(r"(.*?)_?lr([\d.]+)", arm["arm"]) for arm in arms]
    return [
        {**arm, "method": name[1].replace("_", " "), "learning_rate": float(name[2]), "baseline": None}
        for arm, name in zip(arms, found, strict=True)
        if name is not None and all(found)
    ]


def _name(row: Row) -> str:
    return f"{row['experiment']}, {_DATA.get(row['experiment'], row['task'])}"


def describe(rows: list[Row]) -> str:
    """What was measured, e.g. ``fig3, digits: fresh examples to 97 % validation accuracy``."""
    first: dict[str, Any] = rows[0]
    name = _name(first)
    if without_target(rows):
        return f"{name}: where the runs ended"
    if len(targets_of(rows)) > 1:
        return f"{name}: fresh examples, to targets that differ"
    times = first.get("target_in_a_row") or 1
    target = target_words(first["target_metric"], first["target_value"])
    return f"{name}: fresh examples to {target}{f' {times} times in a row' if times > 1 else ''}"
