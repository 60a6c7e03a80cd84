"""The report: every committed table with its figures as Markdown, and that as one HTML page."""

import base64
import io
import os
import re
from collections.abc import Iterable, Sequence
from html import unescape
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from markdown_it import MarkdownIt
from PIL import Image

from adaecho.errors import DataError
from adaecho.records.files import read_bytes
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
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}"
    "td,th{padding:.25rem .6rem;border-bottom:1px solid #ddd;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left;white-space:normal}"
    "p{max-width:60rem}th,td:nth-child(10){white-space:normal}td:nth-child(10){min-width:6rem}"
    "img{max-width:100%}pre,code{background:#f4f4f4}pre{white-space:pre-wrap}"
    "th{cursor:pointer;vertical-align:bottom}"
)
_COLOURS = 64
# A click on a heading sorts by its column: numbers by value, the rest as text.
_SORT = (
    "document.querySelectorAll('th').forEach(th=>th.onclick=()=>{const t=th.closest('table'),"
    "i=[...th.parentNode.children].indexOf(th),n=s=>{const v=parseFloat(s.replace(/,/g,''));"
    "return isNaN(v)?null:v},d=t.dataset.by==i?-1:1;t.dataset.by=d>0?i:'';"
    "[...t.tBodies[0].rows].sort((a,b)=>{"
    "const x=a.cells[i].textContent,y=b.cells[i].textContent,p=n(x),q=n(y);"
    "return d*(p!==null&&q!==null?p-q:x.localeCompare(y))}).forEach(r=>t.tBodies[0].append(r))});"
)


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


_LINKED = {"curves": "training curves", "tuning": "the best trial over those tried"}


def unfinished_note(rows: list[Row]) -> str:
    """Which searches had trials left when their rows were written."""
    left = dict.fromkeys(f"{row['arm']}/{row['repeat']}" for row in rows if row.get("trials_left"))
    return f"Incomplete, with trials that had not ended: searches {', '.join(left)}." if left else ""


def boundary_note(arms: list[Row]) -> str:
    """Which best points lie near the end of an axis (see ``EDGE``): a wider one might have had a better."""
    searched = [arm for arm in arms if arm.get("at_edge")]
    if not searched:
        return ""
    near = [
        f"{arm['arm']}: {key} in {count} of {num_best(arm)} searches"
        for arm in searched
        for key, count in arm["at_edge"].items()
        if count
    ]
    return f"Best points in the outermost {100 * EDGE:g} % of an axis: {'; '.join(near) or 'none'}."


def markdown_report(sections: Sequence[str], before: Sequence[str] = ()) -> str:
    """All sections as Markdown, listed at the top; what is put before them comes first."""
    titles = [section.partition("\n")[0].removeprefix("## ") for section in sections]
    contents = "\n".join(f"* [{title}](#{_anchor(title)})" for title in titles)
    return "\n\n".join(["# Results", contents, *before, EXPLANATION, *sections]) + "\n"


def _anchor(title: str) -> str:
    """What a heading is called in an address: as GitHub does."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def html_report(markdown: str, folder: Path) -> str:
    """Make one page of a report in Markdown, without other files or network; pictures lie in ``folder``."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    body = re.sub(r"<h2>(.*?)</h2>", lambda one: f'<h2 id="{_anchor(unescape(one[1]))}">{one[1]}</h2>', body)
    body = re.sub(r'<img src="([^"]+)"', lambda one: f'<img src="{_inline(folder / unquote(one[1]))}"', body)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>adaecho: results</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>{body}<script>{_SORT}</script></html>\n'
    )


def _inline(picture: Path) -> str:
    """A figure in a palette, which is a third as large and looks the same; a photograph as it is.

    Raises:
        DataError: it is no figure, or of more pixels than Pillow decodes.
    """
    small = io.BytesIO()
    try:
        content = read_bytes(picture)
        with Image.open(io.BytesIO(content), formats=["PNG", "JPEG"]) as image:
            if image.format == "JPEG":
                return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
            image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(
                small, "PNG", optimize=True
            )
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow does
        raise DataError(f"{picture}: can't be shown ({error}); restore it from git, or remove it") from error
    return f"data:image/png;base64,{base64.b64encode(small.getvalue()).decode()}"


def markdown_table(headings: Cells, rows: Sequence[Cells]) -> str:
    rule = ("---", *["---:"] * (len(headings) - 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))
