"""``python -m adaecho.figures``: every figure and the report from the committed tables; no GPU, no network.

A table is ``results/<experiment>/<task>/trials.json``, with ``curves.json`` beside it where curves were kept.
The same tables give the same bytes.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaecho.errors import DataError, told
from adaecho.figures.claims import Decision, Records, decide
from adaecho.figures.report import Section, html_report, markdown_report, section
from adaecho.figures.tables import describe, draw_table
from adaecho.records.files import folder_errors
from adaecho.records.outcome import COLUMNS, Row
from adaecho.records.trials import rows_of


def draw_all(results: Path, into: Path) -> list[Path]:
    """Draw every table under ``results`` and write ``report.md`` and ``report.html``; returns what was
    written.

    Raises:
        DataError: there are no tables, or one can't be read.
    """
    tables = sorted(results.glob("*/*/trials.json"))
    if not tables:
        raise DataError(
            f"{results}: no <experiment>/<task>/trials.json in it; "
            "`python -m adaecho.records.collect` makes them"
        )
    written: list[Path] = []
    sections = []
    for table in tables:
        figures, about = _draw(table, into)
        written += figures
        sections.append(about)
    claims = decisions(tables)
    reports = {"report.md": markdown_report(sections, claims), "report.html": html_report(sections, claims)}
    for name, text in reports.items():
        (into / name).write_text(text)
        written.append(into / name)
    return written


def decisions(tables: Sequence[Path]) -> list[Decision]:
    """Every claim on every task, from the tables ``<experiment>/<task>/trials.json``."""
    by_task: dict[str, Records] = {}
    for table in tables:
        records = by_task.setdefault(table.parts[-2], Records())
        records.rows[table.parts[-3]] = _rows(table)
        records.curves[table.parts[-3]] = _read(table.with_name("curves.json"), [])
    return [one for task in sorted(by_task) for one in decide(by_task[task], task)]


def _draw(table: Path, into: Path) -> tuple[list[Path], Section]:
    rows = _rows(table)
    name = f"{table.parts[-3]}_{table.parts[-2]}"
    curves = _read(table.with_name("curves.json"), [])
    pictures, vectors = (draw_table(rows, curves, into, name, form) for form in ("png", "svg"))
    commands = _read(table.with_name("origin.json"), {}).get("commands", [])
    return [*pictures, *vectors], section(describe(rows), rows, pictures, commands)


def _rows(table: Path) -> list[Row]:
    """The rows of a table, each with the columns that every figure needs."""
    try:
        rows = rows_of(_read(table))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{table}: a damaged table ({error}); collect it again, or remove it") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{table}: no list of rows; collect it again, or remove it")
    if not rows:
        raise DataError(f"{table}: an empty table; collect it again, or remove it")
    for number, row in enumerate(rows):
        missing = [column for column in COLUMNS if column not in row]
        if missing:
            raise DataError(
                f"{table}: row {number} lacks {', '.join(missing)}; collect it again, or remove it"
            )
    return rows


def _read(path: Path, default: Any = None) -> Any:
    """A table; ``default`` where it need not exist and doesn't."""
    if default is not None and not path.exists():
        return default
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path}: no JSON ({error}); restore it from git, or collect it again") from error


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
            print(path)


if __name__ == "__main__":
    main()
