"""The report: every committed table with its figures, as Markdown."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from adaecho.records.outcome import EDGE, Row, num_best
from adaecho.records.table import end_of_sweep

Cells = tuple[str, ...]

EXPLANATION = (
    "Costs are read off at the first evaluation that meets the target, or at the last of so many in a row "
    "where a target asks for several. Each search is represented by the trial that needed fewest fresh "
    "examples. Costs are means over the searches that reached the target, and their range is over these "
    "searches; with one search per arm, over its trials that reached it. The ratio is that of fresh examples "
    "to the baseline's. Missed, diverged and failed count trials; diverged ones are replaced. Where no "
    "target was set: means over the runs of an arm at the end of their budgets, with the range of the "
    "metric; the gain is AdaScale's, averaged over the steps."
)
_LINKED = {"curves": "training curves", "tuning": "the best trial over those tried"}


def section(
    title: str, rows: list[Row], arms: list[Row], figures: list[Path], commands: list[str], into: Path
) -> str:
    """The Markdown of a table's rows: costs to the target, or where the runs ended if there was none.

    Args:
        title: what was measured.
        rows: see ``records.outcome``.
        arms: what ``records.table.summarize`` makes of them.
        figures: files of what is drawn of the records, and of what ``adaecho.show`` drew of a run.
        commands: what made the records; empty where they don't say.
        into: folder of the report.
    """
    columns = end_of_sweep(rows, arms)
    cells = list(zip(*(column.cells for column in columns), strict=True))
    shown = (Path(os.path.relpath(path, into)).as_posix() for path in figures)
    note = "\n\n".join(filter(None, [unfinished_note(rows), boundary_note(arms)]))
    table = markdown_table(tuple(column.heading for column in columns), cells)
    return laid_out(title, shown, table, note, commands=commands)


def laid_out(title: str, figures: Iterable[str], *parts: str, commands: Sequence[str]) -> str:
    """The Markdown of a section: its figure, links to what else was drawn, parts, and the commands."""
    made_by = "```\n" + "\n".join(commands) + "\n```" if commands else ""
    kinds = {figure: PurePosixPath(figure).stem.rpartition("_")[2] for figure in figures}
    pictures = [f"![{title}]({figure})" for figure, kind in kinds.items() if kind not in _LINKED]
    links = ", ".join(f"[{_LINKED[kind]}]({figure})" for figure, kind in kinds.items() if kind in _LINKED)
    also = f"Also drawn: {links}." if links else ""
    return "\n\n".join(filter(None, [f"## {title}", *pictures, also, *parts, made_by]))


def unfinished_note(rows: list[Row]) -> str:
    """Which searches had trials left when their rows were written."""
    left = dict.fromkeys(f"{row['arm']}/{row['repeat']}" for row in rows if row.get("trials_left"))
    return f"Incomplete, with trials that had not ended: searches {', '.join(left)}." if left else ""


def boundary_note(arms: list[Row]) -> str:
    """Which best points lie near the end of an axis (see ``EDGE``): a wider one might have had a better."""
    searched = [arm for arm in arms if arm.get("at_edge")]
    near = [
        f"{arm['arm']}: {key} in {count} of {num_best(arm)} searches"
        for arm in searched
        for key, count in arm["at_edge"].items()
        if count
    ]
    note = f"Best points in the outermost {100 * EDGE:g} % of an axis: {'; '.join(near) or 'none'}."
    return note if searched else ""


def markdown_report(sections: Sequence[str], before: Sequence[str] = ()) -> str:
    """All sections, listed at the top; what is put before them comes first."""
    titles = [section.partition("\n")[0].removeprefix("## ") for section in sections]
    contents = "\n".join(f"* [{title}](#{_anchor(title)})" for title in titles)
    return "\n\n".join(["# Results", contents, *before, EXPLANATION, *sections]) + "\n"


def _anchor(title: str) -> str:
    """What a heading is called in an address: as GitHub does."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def markdown_table(headings: Cells, rows: Sequence[Cells]) -> str:
    """A table whose columns are right-aligned but for the first."""
    rule = ("---", *["---:"] * (len(headings) - 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))
