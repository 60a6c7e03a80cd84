"""The report: every committed table with its figures as Markdown, and that as one HTML page."""

import base64
import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from PIL import Image

from adaecho.errors import DataError
from adaecho.figures.decisions import ABSENT, OPEN, Decision
from adaecho.records.outcome import EDGE, Row
from adaecho.records.statistics import Ratio
from adaecho.records.table import end_of_sweep, summarize

Cells = tuple[str, ...]

EXPLANATION = (
    "Costs are read off at the first evaluation that meets the target. Each search is represented by the "
    "trial that needed fewest fresh examples. Costs are means over the searches that reached the target, and "
    "their range is over these searches; with one search per arm, over its trials that reached it. The "
    "ratio is that of fresh examples to the baseline's. Missed, diverged and failed count trials; diverged "
    "ones are replaced. Where no target was set: means over the runs of an arm at the end of their budgets, "
    "with the range of the metric; the gain is AdaScale's, averaged over the steps."
)
CLAIMS_EXPLANATION = (
    "Each claim of the paper that two arms can decide, on each task that has records of its experiment. "
    "Cheaper: the ratio of geometric mean costs over searches with Welch's 95 % interval; p is Welch's "
    "one-sided, adjusted by Holm for the claims of the task, and beside it that of the permutation test of "
    "ranks; a p smaller than ranks of so many searches can show rests on the t test alone. A search that "
    "missed the target costs at least what it read, and costs are known no better than their grid of "
    "evaluations. No worse: the difference of the best metric with its interval, against a margin of one "
    "percentage point. At most 3 % more: the interval of the ratio ends below 1.03. Fragile: decided, not "
    "so in each of up to four other readings of the same records: the lower and the upper three quarters of "
    "every searched axis, and targets with 1.5 and 2 times the error (of a loss: 0.1 and 0.2 more), unless "
    "guessing meets them. Winners: the ratio for the cheapest trial of each search, run again on new seeds: "
    "the best of many trials is partly luck, and what luck chose doesn't repeat."
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
_CLAIM_HEADINGS = (
    *("claim", "section", "task", "verdict", "effect", "95 % interval", "p", "rank p", "reached"),
    *("turns in", "winners on new seeds"),
)


def section(title: str, rows: list[Row], figures: list[Path], commands: list[str], into: Path) -> str:
    """The Markdown of a table's rows: costs to the target, or where the runs ended if there was none.

    Args:
        title: what was measured.
        rows: see ``records.outcome``.
        figures: files of what is drawn of the records, and of what ``adaecho.show`` drew of a run.
        commands: what made the records; empty where they don't say.
        into: folder of the report.
    """
    columns = end_of_sweep(rows)
    cells = list(zip(*(column.cells for column in columns), strict=True))
    shown = (Path(os.path.relpath(path, into)).as_posix() for path in figures)
    note = boundary_note(summarize(rows))
    table = markdown_table(tuple(column.heading for column in columns), cells)
    return laid_out(title, shown, table, note, commands=commands)


def laid_out(title: str, figures: Iterable[str], *parts: str, commands: Sequence[str]) -> str:
    """The Markdown of a section: figures as the report links them, parts, and the commands that made it."""
    made_by = "```\n" + "\n".join(commands) + "\n```" if commands else ""
    pictures = (f"![{title}]({figure})" for figure in figures)
    return "\n\n".join(filter(None, [f"## {title}", *pictures, *parts, made_by]))


def boundary_note(arms: list[Row]) -> str:
    """Which best points lie near the end of an axis (see ``EDGE``): a wider one might have had a better."""
    searched = [arm for arm in arms if arm.get("at_edge")]
    if not searched:
        return ""
    near = [
        f"{arm['arm']}: {key} in {count} of {arm['reached'] if 'reached' in arm else arm['runs']} searches"
        for arm in searched
        for key, count in arm["at_edge"].items()
        if count
    ]
    return f"Best points in the outermost {100 * EDGE:g} % of an axis: {'; '.join(near) or 'none'}."


def claim_cells(decisions: Sequence[Decision]) -> list[Cells]:
    """The rows of the table of claims, those not yet measured on any task last and once."""
    measured = [one for one in decisions if one.verdict != ABSENT]
    seen = {one.claim.key for one in measured}
    absent = {one.claim.key: one for one in decisions if one.claim.key not in seen}
    return [_claim_row(one) for one in measured] + [
        (one.claim.says, one.claim.section, "-", ABSENT, *("-" for _ in _CLAIM_HEADINGS[4:]))
        for one in absent.values()
    ]


def _claim_row(one: Decision) -> Cells:
    form = "+.4f" if one.claim.no_harm else ".2f"
    reached = "-" if one.reached is None else "{} of {}, {} of {}".format(*one.reached)
    return (
        one.claim.says,
        one.claim.section,
        one.task,
        one.verdict,
        "-" if one.effect is None else format(one.effect.value, form),
        interval_words(one.effect, form),
        p_words(one),
        "-" if one.permutation_p is None else f"{one.permutation_p:.2g}",
        reached,
        turns_words(one),
        with_interval_words(one.rerun),
    )


def p_words(one: Decision) -> str:
    """The adjusted p; where ranks of so many searches can't show one so small, it is of the t test alone."""
    if one.p is None:
        return "-"
    return f"{one.p:.2g}" + (", t alone" if one.least_p is not None and one.p < one.least_p else "")


def turns_words(one: Decision) -> str:
    """The other readings in which the verdict is another one."""
    if one.verdict == OPEN:
        return "-"
    if not one.readings:
        return "no other reading"
    return "; ".join(one.turns_in) or f"none of {len(one.readings)}"


def interval_words(ratio: Ratio | None, form: str) -> str:
    if ratio is None or ratio.low is None or ratio.high is None:
        return "-"
    return f"{ratio.low:{form}} to {ratio.high:{form}}"


def with_interval_words(ratio: Ratio | None) -> str:
    """A ratio with its interval."""
    return "-" if ratio is None else f"{ratio.value:.2f} ({interval_words(ratio, '.2f')})"


def markdown_report(sections: list[str], decisions: Sequence[Decision]) -> str:
    """Claims, where the records can decide any, and all sections as Markdown."""
    claims = []
    if any(one.verdict != ABSENT for one in decisions):
        table = markdown_table(_CLAIM_HEADINGS, claim_cells(decisions))
        claims = ["## Which of the paper's claims hold", CLAIMS_EXPLANATION, table]
    return "\n\n".join(["# Results", *claims, EXPLANATION, *sections]) + "\n"


def html_report(markdown: str, folder: Path) -> str:
    """Make one page of a report in Markdown, without other files or network; pictures lie in ``folder``."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
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
    if picture.suffix == ".jpg":
        return f"data:image/jpeg;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    small = io.BytesIO()
    try:
        with Image.open(picture, formats=["PNG"]) as image:
            image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(
                small, "PNG", optimize=True
            )
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow does
        raise DataError(f"{picture}: can't be shown ({error}); restore it from git, or remove it") from error
    return f"data:image/png;base64,{base64.b64encode(small.getvalue()).decode()}"


def markdown_table(headings: Cells, rows: Sequence[Cells]) -> str:
    rule = ("---", *["---:"] * (len(headings) - 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))
