"""Draw the figures of one experiment on one task from its recorded trials."""

import re
from pathlib import Path
from typing import Any

from adaecho.errors import DataError
from adaecho.figures.arms import draw_ends, draw_fig3
from adaecho.figures.curves import AS_FIG3, COST, Curve, Plot, draw_curves, draw_lines, tuning_curves
from adaecho.figures.style import target_words
from adaecho.records.files import read_json
from adaecho.records.outcome import SETTINGS, Row, targets_of, without_target
from adaecho.records.trials import read_rows

RowsAndCurves = dict[tuple[str, str], tuple[list[Row], list[Curve]]]
"""The rows and the curves of each table, by experiment and task."""
# These experiments reproduce the paper's figures with lines.
LINES = {
    "fig4": Plot("echo_factor", costs=("train_time_s", "fresh_examples")),
    "fig5": Plot("echo_factor", lines="batch_size"),
    "fig6": Plot("batch_size"),
    "fig7a": Plot("batch_shuffle_buffer"),
    "fig7b": Plot("shuffle_buffer"),
}

# The datasets of experiments whose task is named after another dataset.
_DATA = {"bccd": "blood cells", "caltech101": "Caltech-101"}
NOT_AUGMENTED = frozenset({"lm1b", "common_crawl", "small_text"})  # text is not augmented


def draw_table(
    rows: list[Row], arms: list[Row], curves: list[Curve], into: Path, stem: str, form: str
) -> list[Path]:
    """Draw all figures of one experiment on one task, and return their paths.

    The first figure compares the configurations. Up to two more figures show training curves and the progress
    of hyperparameter searches.

    Args:
        rows: one dict per trial, as ``records.outcome`` describes; at least one.
        arms: the result of ``records.table.summarize(rows)``.
        curves: training curve of each search's best trial; may be empty.
        stem: prefix of the file names.
        form: png, svg or pdf.
    """
    first = rows[0]
    curves = [curve for curve in curves if curve["fresh_examples"]]  # a run may have no evaluation
    rows, arms, curves = ([_relabel(one, first["task"]) for one in table] for table in (rows, arms, curves))
    lines = LINES.get(first["experiment"])
    paths, title = [into / f"{stem}.{form}"], describe(rows)
    if without_target(rows) and (rates := _rates(arms)):
        of_rates = Plot("learning_rate", lines="method", costs=(f"final_{first['target_metric']}",))
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
        # The arm <arm>_search<n> repeats the best point of an arm.
        names = {one["arm"]: re.sub(r"_search\d+$", "", one["arm"]) for one in curves}
        with_settings = [of_arms[one["arm"]] | one | {"arm": names[one["arm"]]} for one in curves]
        target = first["target_value"] if len(targets_of(rows)) == 1 else None
        draw_curves(with_settings, paths[1], whose, first["target_metric"], target, lines or AS_FIG3)
    if tuned := tuning_curves(rows):
        paths.append(into / f"{stem}_tuning.{form}")
        whose = f"{_name(first)}: the best trial so far{over}"
        draw_curves(tuned, paths[-1], whose, COST, None, lines or AS_FIG3)
    return paths


def _relabel(one: Row, task: str) -> Row:
    """Rename both variants of example echoing to "example" on tasks without augmentation."""
    is_example = one["echo_variant"] in ("example_before_augmentation", "example_after_augmentation")
    return {**one, "echo_variant": "example"} if is_example and task in NOT_AUGMENTED else one


def _rates(arms: list[Row]) -> list[Row]:
    """Read learning rates and methods from names such as ``e2_lr0.05``; empty if any name has none."""
    found = [re.fullmatch(r"(.*?)_?lr([\d.]+)", arm["arm"]) for arm in arms]
    return [
        {**arm, "method": name[1].replace("_", " "), "learning_rate": float(name[2]), "baseline": None}
        for arm, name in zip(arms, found, strict=True)
        if name is not None and all(found)
    ]


def _name(row: Row) -> str:
    return f"{row['experiment']}, {_DATA.get(row['experiment'], row['task'])}"


def describe(rows: list[Row]) -> str:
    """Return an experiment's title, e.g. ``fig3, digits: fresh examples to 97% validation accuracy``."""
    first: dict[str, Any] = rows[0]
    name = _name(first)
    if without_target(rows):
        return f"{name}: where the runs ended"
    if len(targets_of(rows)) > 1:
        return f"{name}: fresh examples, to targets that differ"
    times = first.get("target_in_a_row") or 1
    target = target_words(first["target_metric"], first["target_value"])
    return f"{name}: fresh examples to {target}{f' {times} times in a row' if times > 1 else ''}"


def read_tables(results: Path) -> RowsAndCurves:
    """Read the trials and training curves of all experiments under ``results``, sorted by path.

    Raises:
        DataError: there are no files ``<experiment>/<task>/trials.json``.
        FolderError: a file is not valid JSON.
    """
    tables = {
        (path.parts[-3], path.parts[-2]): (read_rows(path), _read_next_to(path, "curves.json", []))
        for path in sorted(results.glob("*/*/trials.json"))
    }
    if not tables:
        remedy = "run python -m adaecho.records.collect"
        raise DataError(f"{results}: contains no <experiment>/<task>/trials.json; {remedy}")
    return tables


def read_commands(table: Path) -> list[str]:
    """Return the commands that produced a ``trials.json``; empty if they are not recorded."""
    return list(_read_next_to(table, "origin.json", {}).get("commands", []))


def _read_next_to(table: Path, name: str, default: Any) -> Any:
    path = table.with_name(name)
    return read_json(path) if path.exists() else default
