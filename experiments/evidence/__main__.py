"""``python -m experiments.evidence``: figures and report, with the paper's claims and what is no sweep's.

Beside the tables of sweeps: ``branches.json`` (experiments/repeat_value) and ``cells.json``
(experiments/predicted_time).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from adaecho.errors import DataError
from adaecho.figures.__main__ import draw_tables, main, write_report
from adaecho.figures.committed import read_commands, read_tables, read_whole
from adaecho.records.files import record_errors
from adaecho.records.trials import check_name, rows_of
from experiments.evidence.decisions import decide_all
from experiments.evidence.predicted_time import draw_cells, section_of_cells
from experiments.evidence.repeat_value import draw_branches, section_of_branches
from experiments.evidence.report import claims_section


def draw(results: Path, into: Path) -> list[Path]:
    """Draw everything under ``results`` and write the report; returns what was written.

    Raises:
        DataError: there are no tables, or one can't be read.
    """
    tables = read_tables(results)
    with record_errors(results, DataError):
        claims = claims_section(decide_all(tables))
    written, sections = draw_tables(tables, results, into)
    for name in ("branches.json", "cells.json"):
        for path in sorted(results.glob(f"*/*/{name}")):
            with record_errors(path, DataError):
                figures, about = _draw(path, into)
            written += figures
            sections.append(about)
    return written + write_report(sections, into, claims)


def _draw(path: Path, into: Path) -> tuple[list[Path], str]:
    experiment, task = (check_name("folder", part) for part in path.parts[-3:-1])
    figures = [into / f"{experiment}_{task}.{form}" for form in ("png", "svg")]
    record = read_whole(path)
    drawing: Callable[[Path, str], None]
    if path.name == "branches.json":
        rows = rows_of(record)
        title = f"{experiment}, {task}: what a repeat is worth along a run"
        drawing = partial(draw_branches, rows)
        about = section_of_branches(title, rows, figures[0].name, read_commands(path))
    else:
        title = f"{experiment}, {task} reading and steps: is the time what the records predict?"
        drawing = partial(draw_cells, record)
        about = section_of_cells(title, record, figures[0].name)
    for figure in figures:
        drawing(figure, title)
    return figures, about


if __name__ == "__main__":
    main(draw=draw, prog="python -m experiments.evidence")
