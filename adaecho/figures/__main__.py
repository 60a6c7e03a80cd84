"""``python -m adaecho.figures``: draw the figures of all recorded experiments, and write a report.

The command reads ``results/<experiment>/<task>/trials.json`` and, if it exists, ``curves.json`` with the
training curves. The same input always produces byte-identical files.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from adaecho.errors import print_line, report_errors
from adaecho.figures.report import markdown_report, section
from adaecho.figures.tables import RowsAndCurves, describe, draw_table, read_commands, read_tables
from adaecho.records.files import folder_errors, write_text
from adaecho.records.table import summarize


def draw_all(results: Path, into: Path) -> list[Path]:
    """Draw all experiments under ``results``, write ``report.md``, and return the paths of all files."""
    written, sections = draw_tables(read_tables(results), results, into)
    return [*written, write_report(sections, into)]


def draw_tables(tables: RowsAndCurves, results: Path, into: Path) -> tuple[list[Path], list[str]]:
    """Draw the figures of all experiments.

    Returns:
        The paths of the figures, and the report's sections, one for each experiment and task.
    """
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
    """Write ``report.md`` and return its path. The texts in ``before`` precede the sections."""
    path = into / "report.md"
    write_text(path, markdown_report(sections, before))
    return path


def main(
    arguments: list[str] | None = None,
    draw: Callable[[Path, Path], list[Path]] = draw_all,
    prog: str = "python -m adaecho.figures",
) -> None:
    """Parse the command line, draw the figures, and print the paths of the written files.

    Args:
        draw: function that draws the results in one folder into another folder, and returns the paths.
    """
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the tables")
    parser.add_argument("--into", type=Path, help="folder of the figures (default: <results>/figures)")
    options = parser.parse_args(arguments)
    into = options.into or options.results / "figures"
    with report_errors(), folder_errors(into):
        into.mkdir(parents=True, exist_ok=True)
        for path in draw(options.results, into):
            print_line(path)


if __name__ == "__main__":
    main()
