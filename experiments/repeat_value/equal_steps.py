"""Worth of a repeat at equal steps: ``python -m experiments.repeat_value.equal_steps TASK``

Branches continue from checkpoints along a run without echoing: with new examples, with each echo variant at
e, and with e times as many new examples, which take as many steps as the echoed branch. README.md has
the decision rule. Each run has a file; the same command continues after an interruption, and writes the
tables after the last run.
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

LAST_DECIDED = 3072  # the last checkpoint of the rule, in fresh examples
FACTORS = (2, 4)
SEEDS = range(5000, 5024)
BEFORE = "example_before_augmentation"
AT_LEAST = 0.9  # worth of a repeat, in new examples
LEVEL = 0.05
HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"
_PERMUTATIONS = 10_000

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Subject:
    """A task.

    Attributes:
        overrides: of the command, in addition to ``data.path``.
        variants: of echo; text has no augmentation, so there example echoing has one variant.
        checkpoints: in fresh examples, whole batches.
        fresh: new examples of an echoed branch, 16 batches.
        continuations: from each checkpoint, with different next examples.
        noise: whether to measure AdaScale's sigma^2 and mu^2, split into between and within copies.
    """

    overrides: tuple[str, ...]
    variants: tuple[str, ...]
    checkpoints: tuple[int, ...]
    fresh: int
    continuations: int
    noise: bool


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
    """The task with its learning rate, momentum and batch size."""
    config = config_of([*subject.overrides, *overrides])
    return Workload(config, build_task(config))


def branches_of(subject: Subject) -> list[tuple[str, int, int]]:
    """Echo, factor and new examples (in multiples of an echoed branch's) of each branch."""
    new = [("none", 1, times) for times in (1, *FACTORS)]
    return new + [(variant, factor, 1) for factor in FACTORS for variant in subject.variants]


def run(work: Workload, subject: Subject, seed: int) -> list[Row]:
    """Train once without echoing, with branches from each checkpoint; return a row per branch."""
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
    """Mean loss after each branch, from copies of model and optimizer.

    The branches of a continuation read the same first examples, and first uses have the same augmentation.
    """
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
    """A ratio of two means over the same runs, and its interval."""

    ratio: float
    low: float
    high: float


def ratio_of_means(above: Numbers, below: Numbers, level: float) -> Interval | None:
    """mean(above) / mean(below) with Fieller's interval: every r that Student's test does not reject.

    With d = above - r below the test is mean(d)^2 <= t^2 var(d) / n, a quadratic in r::

        (B^2 - t^2 s_bb / n) r^2 - 2 (A B - t^2 s_ab / n) r + (A^2 - t^2 s_aa / n) <= 0

    Source: E. C. Fieller, 1954, "Some problems in interval estimation".

    Args:
        above, below: of the same runs, [runs].
        level: of the test, e.g. 0.05 for an interval of 95 %.

    Returns:
        None if the mean of ``below`` is not above 0 at this level: the interval is unbounded then.
    """
    if not (np.isfinite(above).all() and np.isfinite(below).all()):
        return None
    number = len(above)
    bound = float(stats.t.ppf(1 - level / 2, number - 1)) ** 2 / number
    a, b = float(above.mean()), float(below.mean())
    (s_aa, s_ab), (_, s_bb) = np.cov(above, below)  # over number - 1
    square, middle, constant = b * b - bound * s_bb, a * b - bound * s_ab, a * a - bound * s_aa
    if b <= 0 or square <= 0:
        return None
    root = np.sqrt(max(middle * middle - square * constant, 0.0))
    return Interval(a / b, float((middle - root) / square), float((middle + root) / square))


def decide(interval: Interval | None) -> str:
    """Whether the whole interval lies at or above a worth of 0.9, or below it."""
    if interval is None:
        return OPEN
    if interval.low >= AT_LEAST:
        return HOLDS
    return FAILS if interval.high < AT_LEAST else OPEN


def gains(rows: Sequence[Row], at: int, branch: tuple[str, int, int]) -> Numbers:
    """Loss of the branch with new examples alone minus the loss of a branch, [runs] by seed."""
    of_branch = {
        (row["seed"], row["echo_variant"], row["echo_factor"], row["times_new"]): row["loss_after"]
        for row in rows
        if row["fresh_examples"] == at
    }
    seeds = sorted({seed for seed, *_ in of_branch})
    return np.array([of_branch[seed, "none", 1, 1] - of_branch[seed, *branch] for seed in seeds])


def readings(rows: Sequence[Row]) -> list[Row]:
    """A row for each echoed branch and checkpoint; the last row is the task's verdict."""
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
    """Correlations of gradient noise with the worth of a repeat: the three readings of README.md.

    The worth of a run at a checkpoint is its gain over the mean gain of as many new examples. The signal is
    mu^2 over the part of sigma^2 that a repeat has in common with its first use.
    """
    positions = sorted({row["fresh_examples"] for row in rows})
    echoed = sorted({(row["echo_variant"], row["echo_factor"]) for row in rows} - {("none", 1)})
    plain = [row for row in rows if row["echo_variant"] == "none" and row["times_new"] == 1]
    between, within, square = (
        np.array([[row[key] for row in plain if row["fresh_examples"] == at] for at in positions]).T
        for key in ("between", "within", "square")
    )  # [runs, checkpoints] each
    signal, worth = {}, {}
    for variant, factor in echoed:
        signal[variant, factor] = square / (between if variant == BEFORE else between + within)
        worth[variant, factor] = np.array([
            gains(rows, at, (variant, factor, 1)) / gains(rows, at, ("none", 1, factor)).mean()
            for at in positions
        ]).T  # fmt: skip
    along = np.mean([_ranks_of_rows(signal[branch], worth[branch]) for branch in echoed], axis=0)
    beyond = [_beyond(signal[branch], worth[branch]) for branch in echoed]  # [runs, runs] each
    new = [worth[BEFORE, e] - worth["example_after_augmentation", e] for e in FACTORS]
    split = np.mean([_ranks_of_rows(-square / within, one) for one in new], axis=0)
    return [
        _with_interval("noise tells a repeat's worth along a run", along),
        {"reading": "it tells more than how far the run is", **_permuted(np.mean(beyond, axis=0))},
        _with_interval("the noise within copies tells what new augmentation adds", split),
    ]


def _ranks_of_rows(ours: Numbers, theirs: Numbers) -> Numbers:
    """Spearman's correlation of corresponding rows, [rows]."""
    return np.array([stats.spearmanr(*pair).statistic for pair in zip(ours, theirs, strict=True)])


def _beyond(signal: Numbers, worth: Numbers) -> Numbers:
    """Contribution of each pair of runs to Spearman's correlation over runs, averaged over checkpoints."""

    def standardised(values: Numbers) -> Numbers:
        ranks = stats.rankdata(values, axis=0)
        ranks = ranks - ranks.mean(0)
        scaled: Numbers = ranks / np.sqrt((ranks**2).sum(0))
        return scaled

    products: Numbers = standardised(signal) @ standardised(worth).T / signal.shape[1]
    return products


def _permuted(products: Numbers) -> Row:
    """The correlation and its one-sided p, from permutations of the runs' noise against their branches."""
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
