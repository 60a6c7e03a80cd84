"""The report: every committed table with its figures, as plain Markdown and as one HTML page."""

import html
from typing import Any

from adaecho.records.ends import COUNTS, ends, without_target
from adaecho.records.outcome import Row, outcome

Arm = dict[str, Any]
Cells = tuple[str, ...]

_HEADINGS = (
    "arm",
    "fresh examples",
    "min to max",
    "ratio",
    "steps",
    "seconds",
    "searches that reached",
    "trials",
    "missed",
    "diverged",
    "failed",
)
EXPLANATION = (
    "Costs are read off at the first evaluation that meets the target. Each search is represented by the "
    "trial that needed fewest fresh examples. Costs are means over the searches that reached the target, the "
    "ratio is that of fresh examples to the baseline's. Missed, diverged and failed count trials; diverged "
    "ones are replaced. Where no target was set: means over the runs of an arm at the end of their budgets, "
    "with minimum and maximum of the metric; the gain is AdaScale's, averaged over the steps."
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
    if not without_target(rows):
        return Section(title, _HEADINGS, [_cells(arm) for arm in outcome(rows)], figures, commands)
    arms = ends(rows)
    finals = [key for key in arms[0] if key.startswith("final_")]
    headings = [heading for key in finals for heading in (_words(key), "min to max")]
    counts = [_words(key) for key in COUNTS]
    cells = [_end_cells(arm, finals) for arm in arms]
    return Section(
        title,
        ("arm", *headings, "best", *counts, "mean gain", "runs", "diverged", "failed"),
        cells,
        figures,
        commands,
    )


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


def _cells(arm: Arm) -> tuple[str, ...]:
    fresh, ratio = arm["fresh_examples"], arm["ratio_to_baseline"]
    return (
        arm["arm"],
        _mean(arm, "fresh_examples", ",.0f"),
        f"{fresh['min']:,} to {fresh['max']:,}" if fresh else "-",
        f"{ratio:.2f}" if ratio is not None else "-",
        _mean(arm, "steps", ",.0f"),
        _mean(arm, "train_time_s", ",.1f"),
        f"{arm['reached']} of {arm['searches']}",
        *(str(arm[key]) for key in ("trials", "missed", "diverged", "failed")),
    )


def _mean(arm: Arm, cost: str, form: str) -> str:
    return format(arm[cost]["mean"], form) if arm[cost] else "-"


def _end_cells(arm: Arm, finals: list[str]) -> Cells:
    metrics: list[str] = []
    for key in finals:
        spread = arm[key]
        metrics += [_mean(arm, key, ".4f"), f"{spread['min']:.4f} to {spread['max']:.4f}" if spread else "-"]
    return (
        arm["arm"],
        *metrics,
        _mean(arm, "best_value", ".4f"),
        *(_mean(arm, key, ",.0f") for key in COUNTS),
        _mean(arm, "mean_gain", ".2f"),
        *(str(arm[key]) for key in ("runs", "diverged", "failed")),
    )


def _words(key: str) -> str:
    return key.replace("_", " ")
