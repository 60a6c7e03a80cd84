"""Measure the value of a repeat at equal steps: ``python -m experiments.repeat_value.equal_steps TASK``

The value of a repeat is the number of new examples that one repeat replaces. To measure it, a model is
trained without repeats. At several checkpoints, copies of the model continue training in three ways:

* A: train on 16 new batches.
* B: train on the examples of the same 16 batches, using each one e times, for several echo variants and e.
* C: train on 16 * e new batches, which takes the same number of steps as B.

Let L be the validation loss afterward. The value of a repeat is (L_A - L_B) / (L_A - L_C).

README.md has the decision rule. After an interruption, the same command continues.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from adaecho.errors import report_errors
from adaecho.records.statistics import mean_interval
from adaecho.tasks import build_task
from adaecho.training.optimizer import make_optimizer
from experiments.repeat_value.measure import Workload, upcoming
from experiments.runs import Row, config_of, options, recorded, write_results

LAST_DECIDED = 3072  # the last checkpoint that the decision rule uses, in fresh examples
FACTORS = (2, 4)
SEEDS = range(5000, 5024)
BEFORE = "example_before_augmentation"
AT_LEAST = 0.9  # the value of a repeat, in new examples, that the rule requires
LEVEL = 0.05
HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"
_PERMUTATIONS = 10_000

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Subject:
    """Settings of the experiment for one task."""

    overrides: tuple[str, ...]  # config overrides, without data.path
    variants: tuple[str, ...]  # echo variants to test
    checkpoints: tuple[int, ...]  # numbers of examples after which copies of the model continue training
    fresh: int  # number of distinct examples in the continuations A and B (16 batches)
    continuations: int  # number of continuations of each kind from a checkpoint, on different examples
    noise: bool  # whether to estimate the gradient noise at each checkpoint


SUBJECTS = {
    "digits": Subject(
        ("task=digits_mlp",),
        ("batch", "example_after_augmentation", BEFORE),
        checkpoints=(256, 512, 1024, 1536, 2048, 3072, 4096, 6144),
        fresh=512,
        continuations=16,
        noise=True,
    ),
    "text": Subject(
        ("experiment=text_imdb", "optimizer.learning_rate=0.5", "optimizer.momentum=0.9"),
        ("batch", BEFORE),
        checkpoints=(256, 512, 1024, 2048, 3072, 6144),
        fresh=256,
        continuations=4,
        noise=False,
    ),
}


def workload(subject: Subject, overrides: Sequence[str]) -> Workload:
    """Return the task and its config, ready for training."""
    config = config_of([*subject.overrides, *overrides])
    return Workload(config, build_task(config))


def branches_of(subject: Subject) -> list[tuple[str, int, int]]:
    """Return the settings with which copies of a model continue training, with and without repeats."""
    # Each setting has an echo variant, an echoing factor, and the number of distinct examples divided by
    # subject.fresh. Continuation A comes first, then all C, then all B.
    new = [("none", 1, times) for times in (1, *FACTORS)]
    return new + [(variant, factor, 1) for factor in FACTORS for variant in subject.variants]


def run(work: Workload, subject: Subject, seed: int) -> list[Row]:
    """Train without repeats. Return a row for each way to continue from each checkpoint."""
    torch.manual_seed(seed)
    model = work.task.build_model()
    optimizer = make_optimizer(work.config, model)
    length = len(next(iter(work.task.source.values())))
    last = subject.checkpoints[-1]
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(length) for _ in range(-(-last // length))])
    found, before = [], 0
    for checkpoint in subject.checkpoints:
        work.train(model, optimizer, order[before:checkpoint], seed=seed * last + checkpoint)
        rest = order[checkpoint : -(-checkpoint // length) * length]
        known = {"seed": seed, "fresh_examples": checkpoint, "loss_before": work.loss(model)}
        if subject.noise:
            known |= work.noise(model, np.random.default_rng((seed, checkpoint)))._asdict()
        found += [
            known | branch
            for branch in _branches(work, subject, (model, optimizer), rest, length, (seed, checkpoint))
        ]
        before = checkpoint
    return found


def _branches(
    work: Workload,
    subject: Subject,
    trained: tuple[torch.nn.Module, torch.optim.Optimizer],
    rest: NDArray[np.int64],
    length: int,
    at: tuple[int, int],
) -> list[Row]:
    """Continue training copies of one model with and without repeats, and return their validation losses."""
    # All copies start with the same model, optimizer and examples, so their losses are paired.
    losses: dict[tuple[str, int, int], list[float]] = {branch: [] for branch in branches_of(subject)}
    for continuation in range(subject.continuations):
        rng = np.random.default_rng((*at, continuation))
        rows = upcoming(rest, max(FACTORS) * subject.fresh, length, rng)
        seed = int(rng.integers(2**62))
        for (echo, factor, times), found in losses.items():
            ours, own = deepcopy(trained)
            new, buffer = rows[: times * subject.fresh], subject.fresh
            work.train(ours, own, new, echo=echo, factor=factor, shuffle_buffer=buffer, seed=seed)
            found.append(work.loss(ours))
    return [
        {"echo_variant": echo, "echo_factor": factor, "times_new": times, "loss_after": float(np.mean(found))}
        for (echo, factor, times), found in losses.items()
    ]


class Interval(NamedTuple):
    """A ratio of two means over the same runs, with its confidence interval."""

    ratio: float
    low: float
    high: float


def ratio_of_means(above: Numbers, below: Numbers, level: float) -> Interval | None:
    """Return mean(above) / mean(below) with Fieller's confidence interval.

    The interval contains every ratio r for which Student's t test does not reject that above - r below has
    mean 0. This condition is a quadratic inequality in r::

        (B^2 - t^2 s_bb / n) r^2 - 2 (A B - t^2 s_ab / n) r + (A^2 - t^2 s_aa / n) <= 0

    Here A and B are the means of ``above`` and ``below`` over n runs, s_aa and s_bb are their sample
    variances, s_ab is their sample covariance, and t is the critical value.

    Source: E. C. Fieller, 1954, "Some problems in interval estimation".

    Args:
        above, below: values of the same runs, [runs].
        level: level of the test, e.g. 0.05 for a 95% interval.

    Returns:
        None if a value is not finite, or if the mean of ``below`` is not significantly above 0.
    """
    if not (np.isfinite(above).all() and np.isfinite(below).all()):
        return None
    number = len(above)
    bound = float(stats.t.ppf(1 - level / 2, number - 1)) ** 2 / number
    a, b = float(above.mean()), float(below.mean())
    (s_aa, s_ab), (_, s_bb) = np.cov(above, below)  # divided by number - 1
    square, middle, constant = b * b - bound * s_bb, a * b - bound * s_ab, a * a - bound * s_aa
    if b <= 0 or square <= 0:
        return None
    root = np.sqrt(max(middle * middle - square * constant, 0.0))
    return Interval(a / b, float((middle - root) / square), float((middle + root) / square))


def decide(interval: Interval | None) -> str:
    """Return "holds" if the interval is at or above 0.9, "does not hold" if below, else "not decided"."""
    if interval is None:
        return OPEN
    if interval.low >= AT_LEAST:
        return HOLDS
    return FAILS if interval.high < AT_LEAST else OPEN


def gains(rows: Sequence[Row], at: int, branch: tuple[str, int, int]) -> Numbers:
    """Return how much lower each run's validation loss is with one continuation than with 16 new batches."""
    # ``at`` is the checkpoint, in examples. ``branch`` is one of the settings of ``branches_of``.
    of_branch = {
        (row["seed"], row["echo_variant"], row["echo_factor"], row["times_new"]): row["loss_after"]
        for row in rows
        if row["fresh_examples"] == at
    }
    seeds = sorted({seed for seed, *_ in of_branch})
    return np.array([of_branch[seed, "none", 1, 1] - of_branch[seed, *branch] for seed in seeds])


def readings(rows: Sequence[Row]) -> list[Row]:
    """Test whether a repeat replaces at least 0.9 new examples at each checkpoint of training."""
    # There is one row for each echo variant, factor and checkpoint, with the number of new examples that a
    # repeat replaces. The last row has the verdict on all checkpoints up to LAST_DECIDED.
    checkpoints = sorted({row["fresh_examples"] for row in rows})
    echoed = sorted({(row["echo_variant"], row["echo_factor"]) for row in rows} - {("none", 1)})
    number = sum(at <= LAST_DECIDED for at in checkpoints) * len(FACTORS)
    found, in_rule, stricter = [], [], []
    for (variant, factor), at in ((branch, at) for branch in echoed for at in checkpoints):
        above = gains(rows, at, (variant, factor, 1))
        new = gains(rows, at, ("none", 1, factor))
        interval = ratio_of_means(above, new, LEVEL)
        row = {
            "echo_variant": variant,
            "echo_factor": factor,
            "fresh_examples": at,
            "gain_of_new": float(new.mean()),
        }
        row |= interval._asdict() if interval else {}
        if variant == BEFORE and at <= LAST_DECIDED:
            row["verdict"] = decide(interval)
            in_rule.append(row["verdict"])
            stricter.append(decide(ratio_of_means(above, new, LEVEL / number)))
        found.append(row)
    verdict = HOLDS if set(in_rule) == {HOLDS} else FAILS if FAILS in stricter else OPEN
    return [
        *found,
        {"rule": f"before augmentation worth >= {AT_LEAST} to {LAST_DECIDED} reads", "verdict": verdict},
    ]


def correlations(rows: Sequence[Row]) -> list[Row]:
    """Return three rank correlations that show how well gradient noise predicts the value of a repeat."""
    positions = sorted({row["fresh_examples"] for row in rows})
    echoed = sorted({(row["echo_variant"], row["echo_factor"]) for row in rows} - {("none", 1)})
    plain = [row for row in rows if row["echo_variant"] == "none" and row["times_new"] == 1]
    between, within, square = (
        np.array([[row[key] for row in plain if row["fresh_examples"] == at] for at in positions]).T
        for key in ("between", "within", "square")
    )  # each is [runs, checkpoints]
    signal, worth = {}, {}
    for variant, factor in echoed:
        # The noise in this ratio is the variance that a repeat shares with the first use of its example. If
        # each repeat is augmented separately, the two do not share the variance between augmentations.
        signal[variant, factor] = square / (between if variant == BEFORE else between + within)
        # The value of a repeat: the loss reduction by repeats, divided by the mean reduction by new examples.
        worth[variant, factor] = np.array([
            gains(rows, at, (variant, factor, 1)) / gains(rows, at, ("none", 1, factor)).mean()
            for at in positions
        ]).T  # fmt: skip
    # Between signal-to-noise ratio and value, over the checkpoints of a run.
    along = np.mean([_ranks_of_rows(signal[branch], worth[branch]) for branch in echoed], axis=0)
    # The same over runs at the same checkpoint.
    beyond = [_correlation_terms(signal[branch], worth[branch]) for branch in echoed]  # each is [runs, runs]
    # Between the noise of augmentation and the additional value of augmenting each repeat, over checkpoints.
    new = [worth[BEFORE, e] - worth["example_after_augmentation", e] for e in FACTORS]
    split = np.mean([_ranks_of_rows(-square / within, one) for one in new], axis=0)
    return [
        _with_interval("noise tells a repeat's worth along a run", along),
        {"reading": "it tells more than how far the run is", **_permuted(np.mean(beyond, axis=0))},
        _with_interval("the noise within copies tells what new augmentation adds", split),
    ]


def _ranks_of_rows(ours: Numbers, theirs: Numbers) -> Numbers:
    """Return Spearman's rank correlation between corresponding rows of both arrays: [rows]."""
    return np.array([stats.spearmanr(*pair).statistic for pair in zip(ours, theirs, strict=True)])


def _correlation_terms(signal: Numbers, worth: Numbers) -> Numbers:
    """Return a matrix [runs, runs] whose trace is a rank correlation, for a permutation test over runs."""
    # Both arguments are [runs, checkpoints]. Element [i, j] combines the signal-to-noise ratio of run i with
    # the value of a repeat in run j, averaged over checkpoints.

    def standardized(values: Numbers) -> Numbers:
        ranks = stats.rankdata(values, axis=0)
        ranks = ranks - ranks.mean(0)
        scaled: Numbers = ranks / np.sqrt((ranks**2).sum(0))
        return scaled

    products: Numbers = standardized(signal) @ standardized(worth).T / signal.shape[1]
    return products


def _permuted(products: Numbers) -> Row:
    """Return the trace of ``products``, with a one-sided p value by random permutations of runs."""
    runs, rng = np.arange(len(products)), np.random.default_rng(0)
    found = float(products[runs, runs].sum())
    drawn = [products[runs, rng.permutation(runs)].sum() for _ in range(_PERMUTATIONS)]
    return {
        "correlation": found,
        "p": (1 + sum(one >= found - 1e-12 for one in drawn)) / (1 + _PERMUTATIONS),
    }


def _with_interval(name: str, of_runs: Numbers) -> Row:
    low, high = mean_interval(of_runs.tolist(), 1 - LEVEL / 3)
    return {"reading": name, "correlation": float(of_runs.mean()), "low": low, "high": high}


def main() -> None:
    typed = options(__doc__, "equal_steps", SUBJECTS, "data.path=FOLDER of the text").parse_args()
    with report_errors():
        subject = SUBJECTS[typed.task]
        work = workload(subject, typed.overrides)
        runs = typed.runs / typed.task
        records = [recorded(runs / f"{seed}.json", partial(run, work, subject, seed)) for seed in SEEDS]
        data = " data.path=FOLDER_OF_IMDB_TEXT" if typed.task == "text" else ""
        command = f"python -m experiments.repeat_value.equal_steps {typed.task}{data}"

        def outcome(rows: list[Row]) -> list[Row]:
            return readings(rows) + (correlations(rows) if subject.noise else [])

        write_results(typed.results / typed.task, records, outcome, command)


if __name__ == "__main__":
    main()
