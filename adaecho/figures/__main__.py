"""``python -m adaecho.figures``: every figure and the report from the committed tables; no GPU, no network.

A table is ``results/<experiment>/<task>/trials.json``, with ``curves.json`` beside it where curves were kept.
The same tables give the same bytes.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from adaecho.errors import DataError, UserError
from adaecho.figures.report import Section, html_report, markdown_report, section
from adaecho.figures.tables import describe, draw_table


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
    for name, text in (("report.md", markdown_report(sections)), ("report.html", html_report(sections))):
        (into / name).write_text(text)
        written.append(into / name)
    return written


def _draw(table: Path, into: Path) -> tuple[list[Path], Section]:
    rows = _read(table)
    if not rows:
        raise DataError(f"{table}: an empty table; collect it again, or remove it")
    name = f"{table.parts[-3]}_{table.parts[-2]}"
    curves = _read(table.with_name("curves.json"), [])
    pictures, vectors = (draw_table(rows, curves, into, name, form) for form in ("png", "svg"))
    commands = _read(table.with_name("origin.json"), {}).get("commands", [])
    title = f"{table.parts[-3]}, {describe(rows)}"
    return [*pictures, *vectors], section(title, rows, [path.name for path in pictures], commands)


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
    try:
        for path in draw_all(options.results, options.into or options.results / "figures"):
            print(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
