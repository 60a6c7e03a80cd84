"""The paper's claims: what each says, which records decide it, by which rule, and what they say.

The rules were fixed before the runs that they judge. "Cheaper" is one-sided: the difference of mean log costs
over searches by Welch's t test, adjusted by Holm (1979) for the claims of a task; the permutation test
(``records.statistics.cheaper_p``) stands beside it. "No harm" is non-inferiority: the interval of the
difference stays above minus the margin. A claim with an excess holds where the 95 % interval of the ratio of
costs ends below one more than the excess. A verdict that another reading of the records turns
(``figures.readings``) is fragile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adaecho.figures.readings import AS_SEARCHED, OTHERS, Costs, Curve, Reading, costs_of_best
from adaecho.records.outcome import Row, arm_of_winner
from adaecho.records.statistics import Ratio, cheaper_p, cost_ratio, holm, welch

LEVEL = 0.05
MARGIN = 0.01  # of the metric within which a result is "no worse": three held-out digits in 360
HOLDS, FAILS, OPEN, ABSENT = "holds", "does not hold", "not decided", "not yet measured"
FRAGILE = "fragile"


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
        cost: what is compared, see ``readings.costs_of_best``.
        excess: where it isn't None, the claim is that the first costs at most this share more.
    """

    key: str
    section: str
    says: str
    experiment: str
    arm: str
    other: str
    no_harm: bool = False
    cost: str = "fresh_examples"
    excess: float | None = None


@dataclass(frozen=True)
class Decision:
    """A claim on one task.

    Attributes:
        verdict: holds, does not hold, fragile, not decided, or not yet measured.
        effect: the ratio of costs (below 1: cheaper), or the difference of metrics for no-harm claims.
        p: of the claim's test, adjusted for the task's claims; None for no-harm claims.
        permutation_p: of the rank test, not adjusted.
        reached: searches of the arm and of the other that reached the target, and of how many.
        turns_in: the readings in which the verdict is another one, or may be; nothing turns what is open.
        readings: how many other readings the records allow.
        rerun: the ratio of costs of the two arms' winners on new seeds, where they were run again.
    """

    claim: Claim
    task: str
    verdict: str
    effect: Ratio | None = None
    p: float | None = None
    permutation_p: float | None = None
    reached: tuple[int, int, int, int] | None = None
    turns_in: tuple[str, ...] = ()
    readings: int = 0
    rerun: Ratio | None = None


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
    Claim("time_saves", "3.2", "where reading takes longer than five steps, echoing at e = 5 takes less time",
          "fig4", "e5", "e1", cost="train_time_s"),
    Claim("time_follows_fresh", "3.2", "a fresh example takes at most 3 % more time at e = 5 than at e = 1",
          "fig4", "e5", "e1", cost="s_per_fresh_example", excess=0.03),
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


@dataclass(frozen=True)
class Records:
    """Of all experiments on one task, by the experiment's name: the rows, and the curves of best trials."""

    rows: dict[str, Sequence[Row]] = field(default_factory=dict)
    curves: dict[str, Sequence[Curve]] = field(default_factory=dict)

    def of_arm(self, experiment: str, arm: str) -> tuple[list[Row], list[Curve]]:
        """The rows and curves of one arm; empty without records."""
        tables = (self.rows.get(experiment, ()), self.curves.get(experiment, ()))
        rows, curves = ([one for one in table if one["arm"] == arm] for table in tables)
        return rows, curves


def decide(records: Records, task: str) -> list[Decision]:
    """Every claim on one task, named ``task``."""
    found = {one.claim.key: one for one in _decide_all(records, task, AS_SEARCHED, worst=True)}
    turns: dict[str, list[str]] = {key: [] for key in found}
    readings = dict.fromkeys(found, 0)
    for reading in OTHERS:
        ends = [_decide_all(records, task, reading, worst) for worst in (True, False)]
        for key, verdicts in _verdicts(ends).items():
            readings[key] += 1
            if found[key].verdict in (HOLDS, FAILS) and verdicts != {found[key].verdict}:
                turns[key].append(reading.name)
    return [
        replace(
            one,
            verdict=FRAGILE if turns[key] else one.verdict,
            turns_in=tuple(turns[key]),
            readings=readings[key],
            rerun=_rerun(one.claim, records),
        )
        for key, one in found.items()
    ]


def _verdicts(ends: list[list[Decision]]) -> dict[str, set[str]]:
    """What each claim's verdict can be in a reading; without the claims that it can't decide."""
    found: dict[str, set[str]] = {}
    for one in (one for end in ends for one in end if one.verdict != ABSENT):
        found.setdefault(one.claim.key, set()).add(one.verdict)
    return found


def _decide_all(records: Records, task: str, reading: Reading, worst: bool) -> list[Decision]:
    found = [_decide(claim, records, task, reading, worst) for claim in CLAIMS]
    adjusted = holm({one.claim.key: one.p for one in found if one.p is not None})
    return [_adjusted(one, adjusted) if one.p is not None else one for one in found]


def _decide(claim: Claim, records: Records, task: str, reading: Reading, worst: bool) -> Decision:
    """Worst: with each arm's costs at the end of what they may be that speaks against the claim."""
    (rows, curves), (other_rows, other_curves) = (
        records.of_arm(claim.experiment, name) for name in (claim.arm, claim.other)
    )
    if not rows or not other_rows:
        return Decision(claim, task, ABSENT)
    if claim.no_harm:
        values, other_values = reading.best_values(rows), reading.best_values(other_rows)
        return (
            _no_harm(claim, values, other_values, task)
            if values and other_values
            else Decision(claim, task, ABSENT)
        )
    if claim.cost != "fresh_examples":
        if reading is not AS_SEARCHED:  # the others are of fresh examples
            return Decision(claim, task, ABSENT)
        ours, theirs = (costs_of_best(one, claim.cost) for one in (rows, other_rows))
        return (
            _cheaper(claim, ours, theirs, task)
            if claim.excess is None
            else _follows(claim, ours, theirs, task)
        )
    costs, other_costs = (
        reading.costs(rows, curves, worst),
        reading.costs(other_rows, other_curves, not worst),
    )
    return (
        _cheaper(claim, costs, other_costs, task) if costs and other_costs else Decision(claim, task, ABSENT)
    )


def _cheaper(claim: Claim, ours: Costs, theirs: Costs, task: str) -> Decision:
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


def _follows(claim: Claim, ours: Costs, theirs: Costs, task: str) -> Decision:
    """Whether the interval of the ratio of costs stays below one more than the excess."""
    assert claim.excess is not None
    our_reached, their_reached = ([cost for cost in costs if cost is not None] for costs in (ours, theirs))
    counts = (len(our_reached), len(ours), len(their_reached), len(theirs))
    effect = cost_ratio(our_reached, their_reached) if our_reached and their_reached else None
    if effect is None or effect.low is None or effect.high is None:
        return Decision(claim, task, OPEN, effect, reached=counts)
    most = 1 + claim.excess
    verdict = HOLDS if effect.high < most else FAILS if effect.low > most else OPEN
    return Decision(claim, task, verdict, effect, reached=counts)


def _no_harm(claim: Claim, ours: list[float], theirs: list[float], task: str) -> Decision:
    """Of the metric's best value in each search; larger is better (accuracy, mAP)."""
    difference = float(np.mean(ours) - np.mean(theirs))
    if min(len(ours), len(theirs)) < 2 or np.var(ours) == np.var(theirs) == 0:
        return Decision(claim, task, OPEN, Ratio(difference, None, None))
    interval = welch(ours, theirs).confidence_interval(0.95)
    verdict = HOLDS if interval.low > -MARGIN else FAILS if interval.high < -MARGIN else OPEN
    return Decision(claim, task, verdict, Ratio(difference, interval.low, interval.high))


def _adjusted(found: Decision, adjusted: Mapping[str, float]) -> Decision:
    p = adjusted[found.claim.key]
    opposite = found.effect is not None and found.effect.low is not None and found.effect.low > 1
    return replace(found, p=p, verdict=HOLDS if p < LEVEL else FAILS if opposite else OPEN)


def _rerun(claim: Claim, records: Records) -> Ratio | None:
    """The ratio of the winners' costs on new seeds, from the experiment of that name with ``_winners``."""
    ours, theirs = (_winners_costs(records, claim.experiment, name) for name in (claim.arm, claim.other))
    return cost_ratio(ours, theirs) if ours and theirs and not claim.no_harm else None


def _winners_costs(records: Records, experiment: str, arm: str) -> list[float]:
    """For the winner of each search (``<arm>_search0``, ...) the geometric mean over its seeds.

    A seed that missed the target counts with what it read.
    """
    found: dict[str, list[float]] = {}
    for row in records.rows.get(f"{experiment}_winners", ()):
        if row["arm"] != arm and arm_of_winner(row["arm"]) == arm:
            cost = row["to_target_fresh_examples"] or row["fresh_examples"]
            found.setdefault(row["arm"], []).append(cost)
    return [float(np.exp(np.log(of_seeds).mean())) for of_seeds in found.values()]


def _welch_p(ours: list[float], theirs: list[float]) -> float:
    a, b = np.log(ours), np.log(theirs)
    if a.var() == b.var() == 0:
        return 0.0 if a.mean() < b.mean() else 1.0
    return float(welch(a, b, "less").pvalue)
