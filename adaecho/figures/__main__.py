"""``python -m adaecho.figures``: every figure and the report from the committed tables; no GPU, no network.

A table is ``results/<experiment>/<task>/trials.json``, with ``curves.json`` beside it where curves were kept.
The same tables give the same bytes.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from adaecho.errors import print_line, report_errors
from adaecho.figures.committed import RowsAndCurves, read_commands, read_tables
from adaecho.figures.report import markdown_report, section
from adaecho.figures.tables import describe, draw_table
from adaecho.records.files import folder_errors, write_text
from adaecho.records.table import summarize

Drawn = tuple[list[Path], list[str]]
"""Files of figures, and the sections of the report that show them."""


def draw_all(results: Path, into: Path) -> list[Path]:
    """Draw every table under ``results`` and write ``report.md``; returns what was written.

    Pictures that lie beside a table (of ``adaecho.show``) are shown with it.

    Raises:
        UserError: there are no tables, or one can't be read.
    """
    written, sections = draw_tables(read_tables(results), results, into)
    return [*written, write_report(sections, into)]


def draw_tables(tables: RowsAndCurves, results: Path, into: Path) -> Drawn:
    """Draw all tables of a folder of results."""
    written: list[Path] = []
    sections: list[str] = []
    for (experiment, task), (rows, curves) in tables.items():
        path, arms = results / experiment / task / "trials.json", summarize(rows)
        stem = f"{experiment}_{task}"
        pictures, vectors = (draw_table(rows, arms, curves, into, stem, form) for form in ("png", "svg"))
        of_runs = sorted(one for one in path.parent.iterdir() if one.suffix in (".png", ".jpg"))
        shown = [*pictures, *of_runs]
        sections.append(section(describe(rows), rows, arms, shown, read_commands(path), into))
        written += [*pictures, *vectors]
    return written, sections


def write_report(sections: Sequence[str], into: Path, before: Sequence[str] = ()) -> Path:
    """Write the report of these sections, what is put ``before`` them first."""
    path = into / "report.md"
    write_text(path, markdown_report(sections, before))
    return path


def main(
    arguments: list[str] | None = None,
    draw: Callable[[Path, Path], list[Path]] = draw_all,
    prog: str = "python -m adaecho.figures",
) -> None:
    """The command, of what ``draw`` makes of a folder of results in one of figures."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the tables")
    parser.add_argument("--into", type=Path, help="where figures and report go (default: <results>/figures)")
    options = parser.parse_args(arguments)
    into = options.into or options.results / "figures"
    with report_errors(), folder_errors(into):
        into.mkdir(parents=True, exist_ok=True)
        for path in draw(options.results, into):
            print_line(path)


if __name__ == "__main__":
    main()
