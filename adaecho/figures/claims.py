"""The paper's claims: what each says, which records decide it, by which rule, and what they say.

The rules were fixed before the runs that they judge. "Cheaper" is one-sided: the difference of mean log costs
over searches by Welch's t test, adjusted by Holm (1979) for the claims of a task; the permutation test
(``records.statistics.cheaper_p``) stands beside it. "No harm" is non-inferiority: the interval of the
difference stays above minus the margin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaecho.records.outcome import Row, best_trials
from adaecho.records.statistics import Ratio, cheaper_p, cost_ratio, holm, welch

LEVEL = 0.05
MARGIN = 0.01  # of the metric within which a result is "no worse": three held-out digits in 360
HOLDS, FAILS, OPEN, ABSENT = "holds", "does not hold", "not decided", "not yet measured"


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper as a comparison of two arms.

    Attributes:
        key: its name in tables.
        section: of the paper.
        says: the claim, in short.
        experiment: whose records decide it.
        arm, other: the claim is that the first is cheaper than the second, or, with ``no_harm``, that its
            best metric is no worse.
    """

    key: str
    section: str
    says: str
    experiment: str
    arm: str
    other: str
    no_harm: bool = False


@dataclass(frozen=True)
class Decision:
    """A claim on one task.

    Attributes:
        verdict: holds, does not hold, not decided, or not yet measured.
        effect: the ratio of costs (below 1: cheaper), or the difference of metrics for no-harm claims.
        p: of the claim's test, adjusted for the task's claims; None for no-harm claims.
        permutation_p: of the rank test, not adjusted.
        reached: searches of the arm and of the other that reached the target, and of how many.
    """

    claim: Claim
    task: str
    verdict: str
    effect: Ratio | None = None
    p: float | None = None
    permutation_p: float | None = None
    reached: tuple[int, int, int, int] | None = None


CLAIMS = (
    Claim("batch_saves", "3.1", "batch echoing at e = 2 needs fewer fresh examples than the baseline",
          "fig3", "batch_e2", "baseline"),
    Claim("after_saves", "3.1", "example echoing after augmentation at e = 2 needs fewer than the baseline",
          "fig3", "example_after_e2", "baseline"),
    Claim("before_saves", "3.1", "example echoing before augmentation at e = 2 needs fewer than the baseline",
          "fig3", "example_before_e2", "baseline"),
    Claim("example_beats_batch", "3.1", "example echoing (after augmentation) needs fewer than batch echoing",
          "fig3", "example_after_e2", "batch_e2"),
    Claim("earlier_beats_later", "3.1", "echoing before augmentation needs fewer than after it",
          "fig3", "example_before_e2", "example_after_e2"),
    Claim("large_factor_saves", "3.3", "even e = 16 needs fewer fresh examples than the baseline",
          "fig5", "e16", "e1"),
    Claim("buffer_helps_batch", "3.5", "batch echoing needs fewer with repeated batches shuffled",
          "fig7a", "batch_e2_buffer16", "batch_e2_buffer0"),
    Claim("buffer_helps_example", "3.5", "example echoing needs fewer with a larger shuffle buffer",
          "fig7b", "example_after_e2_buffer1024", "example_after_e2_buffer64"),
    Claim("batch_no_harm", "3.6", "batch echoing at e = 4 ends no worse than the baseline",
          "fig8", "batch_e4", "baseline", no_harm=True),
    Claim("after_no_harm", "3.6", "example echoing after augmentation at e = 4 ends no worse",
          "fig8", "example_after_e4", "baseline", no_harm=True),
    Claim("before_no_harm", "3.6", "example echoing before augmentation at e = 4 ends no worse",
          "fig8", "example_before_e4", "baseline", no_harm=True),
)  # fmt: skip


def decide(tables: Mapping[str, Sequence[Row]], task: str) -> list[Decision]:
    """Every claim on one task.

    Args:
        tables: the rows of each experiment on this task, by the experiment's name.
        task: its name.
    """
    found = [_decide(claim, tables.get(claim.experiment, ()), task) for claim in CLAIMS]
    adjusted = holm({one.claim.key: one.p for one in found if one.p is not None})
    return [_adjusted(one, adjusted) if one.p is not None else one for one in found]


def _decide(claim: Claim, rows: Sequence[Row], task: str) -> Decision:
    sides = [[row for row in rows if row["arm"] == name] for name in (claim.arm, claim.other)]
    if not all(sides):
        return Decision(claim, task, ABSENT)
    return (_no_harm if claim.no_harm else _cheaper)(claim, sides, task)


def _cheaper(claim: Claim, sides: list[list[Row]], task: str) -> Decision:
    ours, theirs = (_costs(rows) for rows in sides)
    our_reached, their_reached = ([cost for cost in costs if cost is not None] for costs in (ours, theirs))
    counts = (len(our_reached), len(ours), len(their_reached), len(theirs))
    effect = cost_ratio(our_reached, their_reached) if our_reached and their_reached else None
    if min(len(ours), len(theirs)) < 2:
        return Decision(claim, task, OPEN, effect, reached=counts)
    rank_p = cheaper_p(ours, theirs)
    # With fewer than two costs on a side, ranks alone can tell.
    few = min(len(our_reached), len(their_reached)) < 2
    return Decision(
        claim, task, OPEN, effect, rank_p if few else _welch_p(our_reached, their_reached), rank_p, counts
    )


def _no_harm(claim: Claim, sides: list[list[Row]], task: str) -> Decision:
    """Of the metric's best value in each search; larger is better (accuracy, mAP)."""
    ours, theirs = (_best_values(rows) for rows in sides)
    difference = float(np.mean(ours) - np.mean(theirs))
    if min(len(ours), len(theirs)) < 2 or np.var(ours) == np.var(theirs) == 0:
        return Decision(claim, task, OPEN, Ratio(difference, None, None))
    interval = welch(ours, theirs).confidence_interval(0.95)
    verdict = HOLDS if interval.low > -MARGIN else FAILS if interval.high < -MARGIN else OPEN
    return Decision(claim, task, verdict, Ratio(difference, interval.low, interval.high))


def _adjusted(found: Decision, adjusted: Mapping[str, float]) -> Decision:
    p = adjusted[found.claim.key]
    opposite = found.effect is not None and found.effect.low is not None and found.effect.low > 1
    verdict = HOLDS if p < LEVEL else FAILS if opposite else OPEN
    return Decision(found.claim, found.task, verdict, found.effect, p, found.permutation_p, found.reached)


def _costs(rows: list[Row]) -> list[float | None]:
    """The cost of each search's best trial; None where none reached the target."""
    best = {repeat: row["to_target_fresh_examples"] for (_, repeat), row in best_trials(rows).items()}
    return [best.get(repeat) for repeat in sorted({row["repeat"] for row in rows})]


def _best_values(rows: list[Row]) -> list[float]:
    values: dict[int, float] = {}
    for row in rows:
        if row["counted"] and row["best_value"] is not None:
            values[row["repeat"]] = max(values.get(row["repeat"], -np.inf), row["best_value"])
    return list(values.values())


def _welch_p(ours: list[float], theirs: list[float]) -> float:
    a, b = np.log(ours), np.log(theirs)
    if a.var() == b.var() == 0:
        return 0.0 if a.mean() < b.mean() else 1.0
    return float(welch(a, b, "less").pvalue)
