"""``python -m adaecho.figures``: every figure and the report from the committed tables; no GPU, no network.

A table is ``results/<experiment>/<task>/trials.json``, with ``curves.json`` beside it where curves were kept,
``branches.json`` (experiments/repeat_value), or ``cells.json`` (experiments/predicted_time).
The same tables give the same bytes.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from adaecho.errors import DataError, say, told
from adaecho.figures.committed import RowsAndCurves, read_branches, read_commands, read_tables
from adaecho.figures.decisions import decide_all
from adaecho.figures.predicted_time import draw_cells, section_of_cells
from adaecho.figures.repeat_value import draw_branches, section_of_branches
from adaecho.figures.report import html_report, markdown_report, section
from adaecho.figures.tables import describe, draw_table
from adaecho.records.files import folder_errors, read_json, record_errors, write_text
from adaecho.records.trials import check_name


def draw_all(results: Path, into: Path) -> list[Path]:
    """Draw every table under ``results`` and write ``report.md`` and ``report.html``; returns what was
    written. Pictures that lie beside a table (of ``adaecho.show``) are shown with it.

    Raises:
        DataError: there are no tables, or one can't be read.
    """
    tables = read_tables(results)  # all of them, before anything is drawn
    paths = [results / experiment / task / "trials.json" for experiment, task in tables]
    with record_errors(results, DataError):
        claims = decide_all(tables)
    written: list[Path] = []
    sections = []
    beside = [
        path for name in ("branches.json", "cells.json") for path in sorted(results.glob(f"*/*/{name}"))
    ]
    for path in (*paths, *beside):
        with record_errors(path, DataError):
            figures, about = _draw_beside(path, into) if path in beside else _draw(path, tables, into)
        written += figures
        sections.append(about)
    report = markdown_report(sections, claims)
    for name, text in (("report.md", report), ("report.html", html_report(report, into))):
        write_text(into / name, text, durable=False)
        written.append(into / name)
    return written


def _draw(path: Path, tables: RowsAndCurves, into: Path) -> tuple[list[Path], str]:
    experiment, task = path.parts[-3:-1]
    rows, curves = tables[experiment, task]
    name = f"{experiment}_{task}"
    pictures, vectors = (draw_table(rows, curves, into, name, form) for form in ("png", "svg"))
    of_runs = sorted(one for one in path.parent.iterdir() if one.suffix in (".png", ".jpg"))
    about = section(describe(rows), rows, [*pictures, *of_runs], read_commands(path), into)
    return [*pictures, *vectors], about


def _draw_beside(path: Path, into: Path) -> tuple[list[Path], str]:
    """Draw what is no sweep's: the branches of one program, the cells of another."""
    experiment, task = (check_name("folder", part) for part in path.parts[-3:-1])
    figures = [into / f"{experiment}_{task}.{form}" for form in ("png", "svg")]
    draw: Callable[[Path, str], None]
    if path.name == "branches.json":
        rows = read_branches(path)
        title = f"{experiment}, {task}: what a repeat is worth along a run"
        draw = partial(draw_branches, rows)
        about = section_of_branches(title, rows, figures[0].name, read_commands(path))
    else:
        record = read_json(path)
        title = f"{experiment}, {task} reading and steps: is the time what the records predict?"
        draw = partial(draw_cells, record)
        about = section_of_cells(title, record, figures[0].name)
    for figure in figures:
        draw(figure, title)
    return figures, about


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m adaecho.figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the tables")
    parser.add_argument("--into", type=Path, help="where figures and report go (default: <results>/figures)")
    options = parser.parse_args(arguments)
    with told():
        into = options.into or options.results / "figures"
        with folder_errors(into):
            into.mkdir(parents=True, exist_ok=True)
            written = draw_all(options.results, into)
        for path in written:
            say(path)


if __name__ == "__main__":
    main()
