"""``python -m adaecho.figures``: every figure and the report from the committed tables; no GPU, no network.

A table is ``results/<experiment>/<task>/trials.json``, with ``curves.json`` beside it where curves were kept,
``branches.json`` (experiments/repeat_value), or ``cells.json`` (experiments/predicted_time).
The same tables give the same bytes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from adaecho.errors import DataError, say, told
from adaecho.figures.claims_page import claims_page
from adaecho.figures.committed import read_branches, read_commands, read_curves, read_table
from adaecho.figures.decisions import Decision, Records, decide
from adaecho.figures.predicted_time import draw_cells, section_of_cells
from adaecho.figures.repeat_value import draw_branches, section_of_branches
from adaecho.figures.report import html_report, markdown_report, section
from adaecho.figures.tables import describe, draw_table
from adaecho.records.files import folder_errors, read_json, record_errors, write_text
from adaecho.records.outcome import Row
from adaecho.records.trials import check_name


def draw_all(results: Path, into: Path, claims_into: Path | None = None) -> list[Path]:
    """Draw every table under ``results`` and write ``report.md`` and ``report.html``; returns what was
    written. Pictures that lie beside a table (of ``adaecho.show``) are shown with it. The page of claims
    goes into a file of its own, if one is named.

    Raises:
        DataError: there are no tables, or one can't be read.
    """
    tables = sorted(results.glob("*/*/trials.json"))
    if not tables:
        raise DataError(
            f"{results}: no <experiment>/<task>/trials.json in it; "
            "`python -m adaecho.records.collect` makes them"
        )
    for table in tables:  # all of them, before anything is drawn
        with record_errors(table, DataError):
            read_curves(table, read_table(table))
    with record_errors(results, DataError):
        claims = decisions(tables)
    written: list[Path] = []
    sections = []
    for table in tables:
        with record_errors(table, DataError):
            figures, about = _draw(table, into)
        written += figures
        sections.append(about)
    for name, draw in (("branches.json", _draw_branches), ("cells.json", _draw_cells)):
        for table in sorted(results.glob(f"*/*/{name}")):
            with record_errors(table, DataError):
                figures, about = draw(table, into)
            written += figures
            sections.append(about)
    report = markdown_report(sections, claims)
    for name, text in (("report.md", report), ("report.html", html_report(report, into))):
        write_text(into / name, text, durable=False)
        written.append(into / name)
    if claims_into is not None:
        write_text(claims_into, claims_page(claims, rows_of_tables(tables), results), durable=False)
        written.append(claims_into)
    return written


def rows_of_tables(tables: Sequence[Path]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each table, by experiment and task."""
    return {table.parts[-3:-1]: read_table(table) for table in tables}  # type: ignore[misc]


def decisions(tables: Sequence[Path]) -> list[Decision]:
    """Every claim on every task, from the tables ``<experiment>/<task>/trials.json``."""
    by_task: dict[str, Records] = {}
    for table in tables:
        records = by_task.setdefault(table.parts[-2], Records())
        rows = records.rows[table.parts[-3]] = read_table(table)
        records.curves[table.parts[-3]] = read_curves(table, rows)
    return [one for task in sorted(by_task) for one in decide(by_task[task], task)]


def _draw(table: Path, into: Path) -> tuple[list[Path], str]:
    rows = read_table(table)
    name = f"{table.parts[-3]}_{table.parts[-2]}"
    curves = read_curves(table, rows)
    pictures, vectors = (draw_table(rows, curves, into, name, form) for form in ("png", "svg"))
    of_runs = sorted(path for path in table.parent.iterdir() if path.suffix in (".png", ".jpg"))
    return [*pictures, *vectors], section(
        describe(rows), rows, [*pictures, *of_runs], read_commands(table), into
    )


def _draw_branches(table: Path, into: Path) -> tuple[list[Path], str]:
    experiment, task = (check_name("folder", part) for part in table.parts[-3:-1])
    rows = read_branches(table)
    title = f"{experiment}, {task}: what a repeat is worth along a run"
    figures = [into / f"{experiment}_{task}.{form}" for form in ("png", "svg")]
    for path in figures:
        draw_branches(rows, path, title)
    return figures, section_of_branches(title, rows, figures[0].name, read_commands(table))


def _draw_cells(table: Path, into: Path) -> tuple[list[Path], str]:
    experiment, task = (check_name("folder", part) for part in table.parts[-3:-1])
    record = read_json(table)
    title = f"{experiment}, {task} reading and steps: is the time what the records predict?"
    figures = [into / f"{experiment}_{task}.{form}" for form in ("png", "svg")]
    for path in figures:
        draw_cells(record, path, title)
    return figures, section_of_cells(title, record, figures[0].name)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m adaecho.figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the tables")
    parser.add_argument("--into", type=Path, help="where figures and report go (default: <results>/figures)")
    parser.add_argument(
        "--claims", type=Path, help="file for the page of claims, docs/claims.md (default: none)"
    )
    options = parser.parse_args(arguments)
    with told():
        into = options.into or options.results / "figures"
        with folder_errors(into):
            into.mkdir(parents=True, exist_ok=True)
            written = draw_all(options.results, into, options.claims)
        for path in written:
            say(path)


if __name__ == "__main__":
    main()
