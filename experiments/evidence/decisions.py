"""The rules that decide whether each of the paper's claims holds in our records.

A claim compares two configurations (arms), each tuned by several hyperparameter searches. The cost of a
search is the number of fresh examples, steps or seconds that its best trial needed to reach the target.

* A claim of lower cost is tested with Welch's one-sided t test on the mean log costs. Holm's method (1979)
  corrects the p values for the number of claims on a task. A permutation test (``significance.cheaper_p``) is
  also reported.
* A claim of no harm holds if the interval of the difference in metrics lies entirely above minus the margin.
* A claim with an excess holds if the 95% interval of the ratio of costs ends below 1 plus the excess.

A cost may be known only within bounds (see ``readings``). A claim holds only if it holds at the least
favorable ends of all bounds, and fails only if it fails at the most favorable ends. The noise between
searches is taken to be at least the noise that comes from evaluating only at intervals.

A reading is one way to compute costs from the records. A verdict is fragile if another reading changes it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adaecho.records.outcome import Bounds, Row, searched_costs
from adaecho.records.statistics import Noise, Ratio, difference_interval, welch_noise
from experiments.evidence.claims import CLAIMS, Claim
from experiments.evidence.readings import AS_SEARCHED, OTHERS, Curve, Reading
from experiments.evidence.significance import cheaper_p, grid_variance, holm, less_p, power

LEVEL = 0.05
SAVING = 0.8  # the power of a comparison is computed for this ratio of costs
# A metric is "no worse" within this margin, which is about three of the 360 digits in the validation split.
MARGIN = 0.01
HOLDS, FAILS, OPEN, ABSENT = "holds", "does not hold", "not decided", "not yet measured"
FRAGILE = "fragile"


@dataclass(frozen=True)
class Decision:
    """The verdict on one of the paper's claims for one task, with the numbers that support the verdict.

    Attributes:
        verdict: holds, does not hold, fragile, not decided, or not yet measured.
        effect: the ratio of costs (below 1: the first configuration is cheaper), or the difference in metrics
            for no-harm claims, at the least favorable bounds. None if unknown.
        difference: the difference of mean log costs, or of negated metrics, at the most and at the least
            favorable bounds.
        p: the corrected p value of the claim's test. None for claims that an interval decides.
        permutation_p: the p value of the rank test, not corrected.
        least_p: the smallest p value that the rank test can give with this number of searches.
        power: the probability of detecting a true ratio of ``SAVING`` at the first level of Holm's method.
        reached: for the first and then for the second configuration, the number of hyperparameter searches
            that reached the target, and of all searches.
        turns_in: names of other ways to compute costs (readings) that make the verdict fragile.
        readings: the decisions by the other readings, by name.
    """

    claim: Claim
    task: str
    verdict: str
    effect: Ratio | None = None
    difference: tuple[float, float] = (-math.inf, math.inf)
    p: float | None = None
    permutation_p: float | None = None
    least_p: float | None = None
    power: float | None = None
    reached: tuple[int, int, int, int] | None = None
    turns_in: tuple[str, ...] = ()
    readings: Mapping[str, "Decision"] = field(default_factory=dict)


@dataclass(frozen=True)
class Records:
    """The trials of all experiments on one task, and the training curves of the best trials."""

    rows: dict[str, Sequence[Row]] = field(default_factory=dict)
    curves: dict[str, Sequence[Curve]] = field(default_factory=dict)

    def of_arm(self, experiment: str, arm: str) -> tuple[list[Row], list[Curve]]:
        """Return the trials and training curves of one configuration; both are empty without records."""
        tables = (self.rows.get(experiment, ()), self.curves.get(experiment, ()))
        rows, curves = ([one for one in table if one["arm"] == arm] for table in tables)
        return rows, curves


@dataclass(frozen=True)
class _Pair:
    """The results of the two configurations that a claim compares."""

    # For each hyperparameter search, the log cost or, for no-harm claims, the negated metric. Lower is better
    # for both. The two bounds of a value are equal if the value is known exactly.
    ours: Sequence[Bounds]
    theirs: Sequence[Bounds]
    noise: Noise | None  # noise of the difference between the two means; None if unknown

    def is_exact(self) -> bool:
        return all(one.low == one.high for one in (*self.ours, *self.theirs))


def decide_all(tables: Mapping[tuple[str, str], tuple[Sequence[Row], Sequence[Curve]]]) -> list[Decision]:
    """Decide every claim on every task.

    Args:
        tables: the trials and training curves, by experiment and task.
    """
    by_task: dict[str, Records] = {}
    for (experiment, task), (rows, curves) in tables.items():
        records = by_task.setdefault(task, Records())
        records.rows[experiment], records.curves[experiment] = rows, curves
    return [one for task in sorted(by_task) for one in decide(by_task[task], task)]


def decide(records: Records, task: str) -> list[Decision]:
    """Decide every claim on one task."""
    pairs = {claim.key: _pairs(claim, records) for claim in CLAIMS}
    found = _decide_all(task, {key: of_claim.get(AS_SEARCHED.name) for key, of_claim in pairs.items()})
    # All other readings share one estimate of the noise. With separate estimates, a single very favorable
    # cost would widen Welch's interval, and could leave a claim undecided.
    noises = {key: _widest_noise(list(of_claim.values())) for key, of_claim in pairs.items()}
    readings = {
        reading.name: _decide_all(
            task,
            {
                key: replace(of_claim[reading.name], noise=noises[key]) if reading.name in of_claim else None
                for key, of_claim in pairs.items()
            },
        )
        for reading in OTHERS
    }
    return [
        _with_readings(one, {name: readings[name][key] for name in readings}) for key, one in found.items()
    ]


def _with_readings(found: Decision, readings: Mapping[str, Decision]) -> Decision:
    others = {name: one for name, one in readings.items() if one.verdict != ABSENT}
    turns_in = tuple(name for name, one in others.items() if _casts_doubt(found, one))
    verdict = FRAGILE if turns_in else found.verdict
    return replace(found, verdict=verdict, turns_in=turns_in, readings=others)


def _casts_doubt(found: Decision, other: Decision) -> bool:
    """Return whether ``other`` has a different verdict, and its difference supports ``found`` less."""
    if found.verdict not in (HOLDS, FAILS) or other.verdict == found.verdict:
        return False
    if found.verdict == HOLDS:
        return other.difference[1] > found.difference[1]
    return other.difference[0] < found.difference[0]


def _pairs(claim: Claim, records: Records) -> dict[str, _Pair]:
    """Return the results of both configurations, for each way to compute costs that the records allow."""
    ours, theirs = (records.of_arm(claim.experiment, name) for name in (claim.arm, claim.other))
    if not ours[0] or not theirs[0]:
        return {}
    found = {}
    for reading in (AS_SEARCHED, *OTHERS):
        our_values, their_values = (_values(claim, reading, *one) for one in (ours, theirs))
        if our_values is not None and their_values is not None:
            least = _least_variance(claim, our_values, *ours), _least_variance(claim, their_values, *theirs)
            found[reading.name] = _Pair(our_values, their_values, _noise(our_values, their_values, least))
    return found


def _values(
    claim: Claim, reading: Reading, rows: Sequence[Row], curves: Sequence[Curve]
) -> list[Bounds] | None:
    if claim.no_harm:
        best = reading.best_values(rows)
        if best is None:
            return None
        # The metric is accuracy or mAP, so an unknown value lies between 0 and 1, and more is better.
        return [Bounds(-1, 0) if value is None else Bounds(-value, -value) for value in best]
    if claim.cost == "fresh_examples":
        costs = reading.costs(rows, curves)
    else:  # other costs are read only from the searches as run
        costs = searched_costs(rows, claim.cost) if reading is AS_SEARCHED else None
    with np.errstate(divide="ignore"):  # a lower bound may be 0
        return costs and [Bounds(*np.log(cost).tolist()) for cost in costs]


def _least_variance(
    claim: Claim, values: Sequence[Bounds], rows: Sequence[Row], curves: Sequence[Curve]
) -> float:
    """Return the variance of log costs that comes from evaluating the model only at intervals."""
    steps = [np.diff(curve["fresh_examples"]) for curve in curves if len(curve["fresh_examples"]) > 1]
    if claim.no_harm or claim.excess is not None or not steps:
        return 0.0
    if claim.cost != "fresh_examples":  # seconds are recorded at the same evaluations as fresh examples
        values = [Bounds(*np.log(cost).tolist()) for cost in searched_costs(rows)]
    known = [math.exp(_known(value)) for value in values if math.isfinite(_known(value))]
    return grid_variance(known, float(np.median(np.concatenate(steps)))) if known else 0.0


def _noise(ours: Sequence[Bounds], theirs: Sequence[Bounds], least: tuple[float, float]) -> Noise | None:
    known = [[_known(value) for value in values] for values in (ours, theirs)]
    if not all(math.isfinite(value) for values in known for value in values):
        return None
    return welch_noise(known[0], known[1], least)


def _known(value: Bounds) -> float:
    """Return the upper bound of a value, or the lower bound if the upper bound is infinite."""
    return value.high if math.isfinite(value.high) else value.low


def _widest_noise(pairs: Sequence[_Pair]) -> Noise | None:
    """Return the noise with the widest interval, among the first pair and all pairs with exact values."""
    noises = [pair.noise for number, pair in enumerate(pairs) if number == 0 or pair.is_exact()]
    return max(
        (noise for noise in noises if noise is not None),
        key=lambda noise: difference_interval(0, noise)[1],
        default=None,
    )


def _decide_all(task: str, pairs: Mapping[str, _Pair | None]) -> dict[str, Decision]:
    """Decide every claim, and correct the p values for the number of claims."""
    found = {}
    for claim in CLAIMS:
        absent, pair = Decision(claim, task, ABSENT), pairs[claim.key]
        found[claim.key] = _compare(absent, pair) if pair else absent
    adjusted = holm({key: one.p for key, one in found.items() if one.p is not None})
    for key, p in adjusted.items():
        verdict = HOLDS if p < LEVEL else found[key].verdict
        noise, level = getattr(pairs[key], "noise", None), LEVEL / len(adjusted)
        seen = power(math.log(SAVING), noise, level) if noise and noise.error else None
        found[key] = replace(found[key], p=p, verdict=verdict, power=seen)
    return found


def _compare(absent: Decision, pair: _Pair) -> Decision:
    """Decide one claim. Holm's method may later correct the p value and the verdict."""
    claim, noise = absent.claim, pair.noise
    against = _difference(pair.ours, pair.theirs)
    in_favor = -_difference(pair.theirs, pair.ours)
    effect, reached = _effect(claim, against, noise), None if claim.no_harm else _reached(pair)
    found = replace(absent, verdict=OPEN, effect=effect, difference=(in_favor, against), reached=reached)
    if noise is None or (noise.error == 0 and claim.no_harm):
        return found
    most = MARGIN if claim.no_harm else math.log1p(claim.excess or 0)
    if difference_interval(in_favor, noise)[0] > most:
        found = replace(found, verdict=FAILS)
    if claim.no_harm or claim.excess is not None:
        return replace(found, verdict=HOLDS) if difference_interval(against, noise)[1] < most else found
    rank_p = cheaper_p([value.high for value in pair.ours], [value.low for value in pair.theirs])
    searches = len(pair.ours), len(pair.theirs)
    return replace(
        found,
        p=less_p(against, noise) if noise.error else rank_p,
        permutation_p=rank_p,
        least_p=1 / math.comb(sum(searches), searches[0]),
    )


def _difference(ours: Sequence[Bounds], theirs: Sequence[Bounds]) -> float:
    """Return the largest possible difference in means: ours at the upper, theirs at the lower bounds."""
    return float(np.mean([value.high for value in ours]) - np.mean([value.low for value in theirs]))


def _effect(claim: Claim, difference: float, noise: Noise | None) -> Ratio | None:
    """Return the ratio of costs, or the increase of the metric; None if the difference is infinite."""
    if not math.isfinite(difference):
        return None
    known = noise is not None and (noise.error > 0 or not claim.no_harm)
    low, high = difference_interval(difference, noise) if noise and known else (None, None)
    if claim.no_harm:
        return Ratio(-difference, None if high is None else -high, None if low is None else -low)
    return Ratio(math.exp(difference), low and math.exp(low), high and math.exp(high))


def _reached(pair: _Pair) -> tuple[int, int, int, int]:
    ours, theirs = (sum(math.isfinite(value.high) for value in one) for one in (pair.ours, pair.theirs))
    return ours, len(pair.ours), theirs, len(pair.theirs)
