"""``python -m adaecho.figures``: every figure and the report from the committed tables; no GPU, no network.

A table is ``results/<experiment>/<task>/trials.json``, with ``curves.json`` beside it where curves were kept.
The same tables give the same bytes.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from adaecho.errors import DataError, say, told
from adaecho.figures.committed import RowsAndCurves, is_name, read_commands, read_tables
from adaecho.figures.report import html_report, markdown_report, section
from adaecho.figures.tables import describe, draw_table
from adaecho.records.files import (
    check_no_link,
    folder_errors,
    record_errors,
    remove_leftovers,
    write_text,
)
from adaecho.records.lock import alone
from adaecho.records.table import summarize

Drawn = tuple[list[Path], list[str]]
"""Files of figures, and the sections of the report that show them."""


def draw_all(results: Path, into: Path) -> list[Path]:
    """Draw every table under ``results`` and write ``report.md`` and ``report.html``; returns what was
    written. Pictures that lie beside a table (of ``adaecho.show``) are shown with it.

    Raises:
        DataError: there are no tables, or one can't be read.
    """
    written, sections = draw_tables(read_tables(results), results, into)
    return written + write_report(sections, into)


def draw_tables(tables: RowsAndCurves, results: Path, into: Path) -> Drawn:
    """Draw all tables of a folder of results."""
    written: list[Path] = []
    sections: list[str] = []
    for experiment, task in tables:
        path = results / experiment / task / "trials.json"
        with record_errors(path, DataError):
            figures, about = _draw(path, tables, into)
        written += figures
        sections.append(about)
    return written, sections


def _draw(path: Path, tables: RowsAndCurves, into: Path) -> tuple[list[Path], str]:
    experiment, task = path.parts[-3:-1]
    rows, curves = tables[experiment, task]
    arms, name = summarize(rows), f"{experiment}_{task}"
    pictures, vectors = (draw_table(rows, arms, curves, into, name, form) for form in ("png", "svg"))
    beside = (one for one in path.parent.iterdir() if one.suffix in (".png", ".jpg"))
    # Of another's folder: no link to a file of ours, and no name that the report's Markdown reads as more.
    of_runs = sorted(one for one in beside if not one.is_symlink() and is_name(one.name))
    about = section(describe(rows), rows, arms, [*pictures, *of_runs], read_commands(path), into)
    return [*pictures, *vectors], about


def write_report(sections: Sequence[str], into: Path, before: Sequence[str] = ()) -> list[Path]:
    """Write the report of these sections, what is put ``before`` them first."""
    text = markdown_report(sections, before)
    written = {into / "report.md": text, into / "report.html": html_report(text, into)}
    for path, content in written.items():
        write_text(path, content, durable=False)
    return list(written)


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
    with told():
        into = options.into or options.results / "figures"
        if options.into is None:
            check_no_link(into)
        with folder_errors(into):
            into.mkdir(parents=True, exist_ok=True)
            with alone(into):
                remove_leftovers(into)
                written = draw(options.results, into)
        for path in written:
            say(path)


if __name__ == "__main__":
    main()
