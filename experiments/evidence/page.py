"""Write docs/claims.md, the page with a verdict on each of the paper's claims."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from adaecho.figures.report import Cells, markdown_table
from adaecho.figures.tables import read_commands
from adaecho.records.files import read_json
from adaecho.records.outcome import Row
from adaecho.records.statistics import Ratio
from experiments.evidence.decisions import ABSENT, OPEN, SAVING, Decision

TEMPLATE = Path(__file__).with_name("claims_page.txt")
TASKS = {"digits": "digits", "cifar10": "CIFAR-10", "small_text": "text"}
Tables = Mapping[tuple[str, str], Sequence[Row]]
"""The rows of each table, by experiment and task."""


def claims_page(decisions: Sequence[Decision], tables: Tables, results: Path) -> str:
    """Return the text of docs/claims.md: a template filled with the verdicts."""
    page = TEMPLATE.read_text().replace("{overview}", overview(decisions))
    return page.replace("{experiments}", "\n\n".join(of_experiments(decisions, tables, results)))


def overview(decisions: Sequence[Decision]) -> str:
    """Return a table of effects and verdicts, with one row per claim and one column per task."""
    by_claim: dict[str, dict[str, str]] = {}
    for one in decisions:
        if one.verdict != ABSENT:
            by_claim.setdefault(one.claim.says, {})[one.task] = _brief(one)
    rows = [(says, *(of_task.get(task, "-") for task in TASKS)) for says, of_task in by_claim.items()]
    return markdown_table(("claim of the paper", *TASKS.values()), rows)


def _brief(one: Decision) -> str:
    if one.effect is None:
        return one.verdict
    value = one.effect.value
    return f"{f'{100 * value:+.2f} points' if one.claim.no_harm else f'{value:.2f}'}, {one.verdict}"


def of_experiments(decisions: Sequence[Decision], tables: Tables, results: Path) -> list[str]:
    """Return a section for each experiment and task whose records decide claims."""
    path = results / "earlier_verdicts.json"
    before = read_json(path)["verdicts"] if path.exists() else []
    earlier = {(one["claim"], one["task"]): one["verdict"] for one in before}
    headings = (
        "claim", "effect", "95% interval", "rerun interval", "p", "rank p", f"power at {SAVING}", "verdict",
        "verdict before", "fails in",
    )  # fmt: skip
    parts = []
    for (experiment, task), rows in tables.items():
        of_claims = (one for one in decisions if (one.claim.experiment, one.task) == (experiment, task))
        found = [_claim_row(one, earlier.get((one.claim.key, task), "-")) for one in of_claims if one.effect]
        if found:
            commands = "\n".join(read_commands(results / experiment / task / "trials.json"))
            minutes = sum(row["train_time_s"] or 0 for row in rows) / 60
            page = {"fig7": "fig3", "fig8": "fig5"}.get(experiment[:4], experiment[:4])
            parts += [
                f"## {experiment} on {TASKS.get(task, task)}",
                f"```bash\n{commands}\n```",
                f"{len(rows):,} runs, {minutes:,.0f} minutes of training. "
                f"[Protocol and caveats](../experiments/{page}/README.md).",
                markdown_table(headings, found),
            ]
    return parts


def _claim_row(one: Decision, before: str) -> Cells:
    form = "+.4f" if one.claim.no_harm else ".2f"
    assert one.effect is not None
    p = "-"
    if one.p is not None:
        # With few searches, the rank test cannot give a p this small, so only the t test does.
        p = f"{one.p:.2g}" + (", t alone" if one.least_p is not None and one.p < one.least_p else "")
    turned = "; ".join(one.turns_in) or f"none of {len(one.readings)}" if one.readings else "single analysis"
    return (
        one.claim.says,
        format(one.effect.value, form),
        interval_words(one.effect, form),
        interval_words(_prediction_interval(one.effect, one.claim.no_harm), form),
        p,
        "-" if one.permutation_p is None else f"{one.permutation_p:.2g}",
        "-" if one.power is None else f"{100 * one.power:.0f}%",
        one.verdict,
        before,
        "-" if one.verdict == OPEN else turned,
    )


def interval_words(ratio: Ratio, form: str) -> str:
    """Return an interval in words, e.g. ``0.50 to 0.60``, or ``-`` if there is no interval."""
    if ratio.low is None or ratio.high is None:
        return "-"
    return f"{ratio.low:{form}} to {ratio.high:{form}}"


def _prediction_interval(effect: Ratio, is_difference: bool) -> Ratio:
    """Return the interval in which a rerun of the experiment would find the effect with 95% probability."""
    # A rerun is as noisy as the experiment, so the prediction interval is sqrt(2) times as wide as the
    # confidence interval. For ratios, this is true of the logs.
    if effect.low is None or effect.high is None:
        return effect
    to, back = (float, float) if is_difference else (math.log, math.exp)
    value, half = to(effect.value), (to(effect.high) - to(effect.low)) / math.sqrt(2)
    return Ratio(effect.value, back(value - half), back(value + half))
