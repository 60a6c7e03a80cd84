"""The table of claims, as the report and docs/claims.md show it."""

from collections.abc import Sequence

from adaecho.figures.report import Cells, markdown_table
from adaecho.records.statistics import Ratio
from experiments.evidence.decisions import ABSENT, OPEN, Decision

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
_CLAIM_HEADINGS = (
    *("claim", "section", "task", "verdict", "effect", "95 % interval", "p", "rank p", "reached"),
    *("turns in", "winners on new seeds"),
)


def claims_section(decisions: Sequence[Decision]) -> list[str]:
    """Its Markdown; nothing where the records can decide no claim."""
    if all(one.verdict == ABSENT for one in decisions):
        return []
    table = markdown_table(_CLAIM_HEADINGS, claim_cells(decisions))
    return ["## Which of the paper's claims hold", CLAIMS_EXPLANATION, table]


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
