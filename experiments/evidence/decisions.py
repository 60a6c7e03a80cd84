"""The rules that decide whether each of the paper's claims holds in our records.

A claim compares two configurations (arms). The cost of a configuration is the number of fresh examples (or
steps or seconds) to the target. Each configuration is tuned by several hyperparameter searches, each of which
yields one cost.

* A claim that one configuration is cheaper than the other is tested one-sided. Welch's t test compares the
  mean log costs over searches. Holm's method (1979) corrects the p values for the number of claims of a task.
  The permutation test (``significance.cheaper_p``) is reported too.
* A claim of "no harm" is a claim of non-inferiority. It holds if the interval of the difference lies above
  minus the margin.
* A claim with an excess holds if the 95 % interval of the ratio of costs ends below 1 plus the excess.

The cost of a search is often known only up to bounds (see ``readings``). For example, if a search missed the
target, its cost is at least the number of examples that it read. A claim holds only if it holds in the least
favorable case: the first configuration's costs at their upper bounds and the second's at their lower bounds.
It fails only if it fails in the most favorable case, at the opposite ends of the bounds. The noise between
searches is at least the noise that comes from evaluating only at intervals.

A reading is one way to compute costs from the records. A verdict is fragile if another reading changes it. A
reading that is at least as favorable to a claim must never give a weaker verdict. With separate estimates of
the noise, a more favorable reading could stay undecided, because a single very favorable cost widens Welch's
interval. Therefore all readings other than the searches as run share a single noise, the widest among the
readings with known costs. If the searches as run decide a claim, a difference that is at least as large
decides it in the same way.
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

    A claim compares two configurations, each tuned by several hyperparameter searches.

    Attributes:
        verdict: holds, does not hold, fragile, not decided, or not yet measured.
        effect: the ratio of costs (below 1: the first configuration is cheaper), at the unfavorable ends of
            their bounds, or the difference of metrics for no-harm claims. None if unknown.
        difference: the difference of mean log costs, or of negated metrics, at the favorable and at the
            unfavorable ends of the bounds.
        p: the p value of the claim's test, corrected for the number of the task's claims. None for claims
            that an interval decides.
        permutation_p: the p value of the rank test, not corrected.
        least_p: the smallest p value that the rank test can give with this number of searches. A smaller
            ``p`` relies on the t test alone.
        power: the probability to detect a true ratio of ``SAVING`` at the level of the first step of Holm's
            method.
        reached: the number of the first configuration's searches that reached the target, the number of all
            its searches, and the same two numbers of the second configuration.
        turns_in: names of the other readings (ways to compute costs) that change the verdict or may change
            it. Empty if the verdict is open.
        readings: the decisions by the other possible readings, by name.
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
    """The recorded trials of all experiments on one task, and the training curves of the best trials.

    Attributes:
        rows: trials, by the name of the experiment.
        curves: training curves, by the name of the experiment.
    """

    rows: dict[str, Sequence[Row]] = field(default_factory=dict)
    curves: dict[str, Sequence[Curve]] = field(default_factory=dict)

    def of_arm(self, experiment: str, arm: str) -> tuple[list[Row], list[Curve]]:
        """Return the trials and training curves of one configuration, which are empty without records."""
        tables = (self.rows.get(experiment, ()), self.curves.get(experiment, ()))
        rows, curves = ([one for one in table if one["arm"] == arm] for table in tables)
        return rows, curves


@dataclass(frozen=True)
class _Pair:
    """Results of the two configurations that a claim compares, with one value per hyperparameter search.

    A value is the logarithm of a cost, or a negated metric, so a lower value is better.

    Attributes:
        ours, theirs: values of the claim's first and second configuration, each as bounds.
        noise: uncertainty of the difference between the means of both. None if unknown.
    """

    ours: Sequence[Bounds]
    theirs: Sequence[Bounds]
    noise: Noise | None

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
    noises = {key: _widest(list(of_claim.values())) for key, of_claim in pairs.items()}
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
    turns_in = tuple(name for name, one in others.items() if _turns(found, one))
    verdict = FRAGILE if turns_in else found.verdict
    return replace(found, verdict=verdict, turns_in=turns_in, readings=others)


def _turns(found: Decision, other: Decision) -> bool:
    """Return whether another way to compute costs (reading) casts doubt on a verdict.

    The other decision must have a different verdict, and a difference that supports the first verdict less.

    Args:
        found: the decision by the searches as they were run.
        other: the decision by the other reading.
    """
    if found.verdict not in (HOLDS, FAILS) or other.verdict == found.verdict:
        return False
    if found.verdict == HOLDS:
        return other.difference[1] > found.difference[1]
    return other.difference[0] < found.difference[0]


def _pairs(claim: Claim, records: Records) -> dict[str, _Pair]:
    """Return the results that a claim compares, by the name of each reading that the records allow."""
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
    else:  # for other costs the only reading is that of the searches as run
        costs = searched_costs(rows, claim.cost) if reading is AS_SEARCHED else None
    with np.errstate(divide="ignore"):  # a lower bound may be 0
        return costs and [Bounds(*np.log(cost).tolist()) for cost in costs]


def _least_variance(
    claim: Claim, values: Sequence[Bounds], rows: Sequence[Row], curves: Sequence[Curve]
) -> float:
    """Return the variance of log costs that arises because training is evaluated only at intervals.

    The result is 0 for metrics, and for seconds per fresh example.
    """
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


def _widest(pairs: Sequence[_Pair]) -> Noise | None:
    """Return the noise that gives the widest confidence interval.

    The first pair counts in any case, and other pairs only if all their values are exactly known.
    """
    noises = [pair.noise for number, pair in enumerate(pairs) if number == 0 or pair.is_exact()]
    return max(
        (noise for noise in noises if noise is not None),
        key=lambda noise: difference_interval(0, noise)[1],
        default=None,
    )


def _decide_all(task: str, pairs: Mapping[str, _Pair | None]) -> dict[str, Decision]:
    """Decide every claim, and correct the p values for the number of claims.

    Args:
        task: name of the task.
        pairs: the results that each claim compares, by the claim's key. None if they are not yet measured.

    Returns:
        The decisions by the claim's key.
    """
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
    """Decide one claim. For a claim that is tested, Holm's method later corrects p value and verdict."""
    claim, noise = absent.claim, pair.noise
    against = _difference(pair.ours, pair.theirs)
    in_favour = -_difference(pair.theirs, pair.ours)
    effect, reached = _effect(claim, against, noise), None if claim.no_harm else _reached(pair)
    found = replace(absent, verdict=OPEN, effect=effect, difference=(in_favour, against), reached=reached)
    if noise is None or (noise.error == 0 and claim.no_harm):
        return found
    most = MARGIN if claim.no_harm else math.log1p(claim.excess or 0)
    if difference_interval(in_favour, noise)[0] > most:
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
    """Return the largest possible difference of means: ours at the upper, theirs at the lower bounds."""
    return float(np.mean([value.high for value in ours]) - np.mean([value.low for value in theirs]))


def _effect(claim: Claim, difference: float, noise: Noise | None) -> Ratio | None:
    """Return the effect for the report: a ratio of costs, or an increase of the metric.

    The result is None if the difference is infinite.
    """
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
