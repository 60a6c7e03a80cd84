"""The report: every committed table with its figures, as plain Markdown and as one HTML page."""

import html

from adaecho.records.outcome import Row
from adaecho.records.table import end_of_sweep

Cells = tuple[str, ...]

EXPLANATION = (
    "Costs are read off at the first evaluation that meets the target. Each search is represented by the "
    "trial that needed fewest fresh examples. Costs are means over the searches that reached the target, and "
    "their range is over these searches; with one search per arm, over its trials that reached it. The "
    "ratio is that of fresh examples to the baseline's. Missed, diverged and failed count trials; diverged "
    "ones are replaced. Where no target was set: means over the runs of an arm at the end of their budgets, "
    "with the range of the metric; the gain is AdaScale's, averaged over the steps."
)
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:.25rem .6rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}code{background:#f4f4f4}"
)


class Section:
    """One experiment on one task.

    Args:
        title: what was measured.
        headings: of the table.
        rows: its cells.
        figures: file names, relative to the report.
        commands: what made the records; empty where they don't say.
    """

    def __init__(
        self, title: str, headings: Cells, rows: list[Cells], figures: list[str], commands: list[str]
    ) -> None:
        self.title, self.figures, self.commands = title, figures, commands
        self.headings, self.rows = headings, rows

    def markdown(self) -> str:
        parts = [f"## {self.title}", *(f"![{self.title}]({name})" for name in self.figures)]
        rule = ["---"] + ["---:"] * (len(self.headings) - 1)
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in (self.headings, tuple(rule), *self.rows)))
        parts += ["```\n" + "\n".join(self.commands) + "\n```"] if self.commands else []
        return "\n\n".join(parts)

    def html(self) -> str:
        title = html.escape(self.title)
        images = "".join(f'<p><img src="{html.escape(name)}" alt="{title}"></p>' for name in self.figures)
        rows = "".join(_html_row(row, "td") for row in self.rows)
        commands = "".join(f"<p><code>{html.escape(command)}</code></p>" for command in self.commands)
        return f"<h2>{title}</h2>{images}<table>{_html_row(self.headings, 'th')}{rows}</table>{commands}"


def section(title: str, rows: list[Row], figures: list[str], commands: list[str]) -> Section:
    """The section of a table's rows: costs to the target, or where the runs ended if there was none."""
    columns = end_of_sweep(rows)
    cells = list(zip(*(column.cells for column in columns), strict=True))
    return Section(title, tuple(column.heading for column in columns), cells, figures, commands)


def markdown_report(sections: list[Section]) -> str:
    """All sections as Markdown."""
    return "\n\n".join(["# Results", EXPLANATION, *(section.markdown() for section in sections)]) + "\n"


def html_report(sections: list[Section]) -> str:
    """All sections as one page without scripts; its pictures lie beside it."""
    body = "".join(section.html() for section in sections)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>adaecho: results</title>'
        f"<style>{_STYLE}</style><h1>Results</h1><p>{html.escape(EXPLANATION)}</p>{body}</html>\n"
    )


def _html_row(cells: tuple[str, ...], kind: str) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"
