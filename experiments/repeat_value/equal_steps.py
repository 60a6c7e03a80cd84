"""What is a repeat worth at equal steps? ``python -m experiments.repeat_value.equal_steps digits``

From checkpoints along a run without echoing three kinds of branches continue: with new examples, with each
echo variant at e, and with e times as many new examples, which take as many steps as the echoed branch. The
rule is in README.md beside this file. Each run is kept in a file of its own, so that the same command
goes on after an interruption; once all have ended it writes the tables.
"""

import argparse
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from numpy.typing import NDArray
from scipy import stats

from adaecho.config.schema import from_plain, to_plain
from adaecho.errors import report_errors
from adaecho.records.collect import one_line_each, write_tables
from adaecho.records.environment import environment
from adaecho.records.files import folder_errors, read_json, write_json, write_text
from adaecho.records.statistics import mean_interval
from adaecho.records.trials import table_text
from adaecho.run import CONF
from adaecho.tasks import build_task
from adaecho.training.optimizer import make_optimizer
from experiments.repeat_value.measure import Noise, Workload, upcoming

LAST_DECIDED = 3072  # the last checkpoint of the rule, in fresh examples
FACTORS = (2, 4)
SEEDS = range(5000, 5024)
BEFORE = "example_before_augmentation"
AT_LEAST = 0.9  # worth of a repeat, in new examples
LEVEL = 0.05
HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"
_PERMUTATIONS = 10_000
_DIGITS = 7  # significant ones of a record

Row = dict[str, Any]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        overrides: of the command, beside ``data.path``.
        variants: of echo; of text the place of augmentation is no matter, as there is none.
        checkpoints: in fresh examples, whole batches.
        fresh: new examples of an echoed branch, 16 batches.
        continuations: from each checkpoint, which differ in what is read next.
        noise: whether AdaScale's sigma^2 and mu^2 are measured, split into between and within copies.
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
    """The task with its own rate, momentum and batch size."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = from_plain(to_plain(compose("config", overrides=[*subject.overrides, *overrides])))
    return Workload(config, build_task(config))


def branches_of(subject: Subject) -> list[tuple[str, int, int]]:
    """(echo, factor, new examples in multiples of an echoed branch's) of each branch."""
    new = [("none", 1, times) for times in (1, *FACTORS)]
    return new + [(variant, factor, 1) for factor in FACTORS for variant in subject.variants]


def run(work: Workload, subject: Subject, seed: int) -> list[Row]:
    """One run without echoing, with the branches from each of its checkpoints: a row for each branch."""
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
            known |= _noise(work, model, seed, checkpoint)._asdict()
        found += [
            known | branch
            for branch in _branches(work, subject, (model, optimizer), rest, length, (seed, checkpoint))
        ]
        before = checkpoint
    return found


def _noise(work: Workload, model: torch.nn.Module, seed: int, checkpoint: int) -> Noise:
    return work.noise(model, np.random.default_rng((seed, checkpoint)))


def _branches(
    work: Workload,
    subject: Subject,
    trained: tuple[torch.nn.Module, torch.optim.Optimizer],
    rest: NDArray[np.int64],
    length: int,
    at: tuple[int, int],
) -> list[Row]:
    """The mean loss after each branch; model and optimizer stay as they are.

    The branches of a continuation read the same first examples, and first uses have the same augmentation.
    """
    losses: dict[tuple[str, int, int], list[float]] = {branch: [] for branch in branches_of(subject)}
    for continuation in range(subject.continuations):
        rng = np.random.default_rng((*at, continuation))
        rows = upcoming(rest, max(FACTORS) * subject.fresh, length, rng)
        seed = int(rng.integers(2**62))
        for (echo, factor, times), found in losses.items():
            ours, own = deepcopy(trained)
            ours_rows = rows[: times * subject.fresh]
            work.train(
                ours, own, ours_rows, echo=echo, factor=factor, shuffle_buffer=subject.fresh, seed=seed
            )
            found.append(_loss(work, ours))
    return [
        {"echo_variant": echo, "echo_factor": factor, "times_new": times, "loss_after": float(np.mean(found))}
        for (echo, factor, times), found in losses.items()
    ]


def _loss(work: Workload, model: torch.nn.Module) -> float:
    """The validation's cross entropy; infinite where the branch diverged."""
    try:
        return work.loss(model)
    except ValueError:
        return float("inf")


class Interval(NamedTuple):
    """A ratio of two means over the same runs, and the values that a Student test doesn't refuse."""

    ratio: float
    low: float
    high: float


def ratio_of_means(above: Numbers, below: Numbers, level: float) -> Interval | None:
    """mean(above) / mean(below) with Fieller's interval: each r for which mean(above - r below) may be 0.

    With d = above - r below the test is mean(d)^2 <= t^2 var(d) / n, a quadratic in r::

        (B^2 - t^2 s_bb / n) r^2 - 2 (A B - t^2 s_ab / n) r + (A^2 - t^2 s_aa / n) <= 0

    Source: E. C. Fieller, 1954, "Some problems in interval estimation".

    Args:
        above, below: of the same runs, [runs].
        level: of the test, e.g. 0.05 for an interval of 95 %.

    Returns:
        None where ``below`` has no mean above 0 at this level: the interval isn't bounded then.
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
    """Whether a worth of at least 0.9 holds with the whole interval."""
    if interval is None:
        return OPEN
    if interval.low >= AT_LEAST:
        return HOLDS
    return FAILS if interval.high < AT_LEAST else OPEN


def gains(rows: Sequence[Row], at: int, branch: tuple[str, int, int]) -> Numbers:
    """By how much a branch ended below the one with the new examples alone, [runs] by seed."""
    of_branch = {
        (row["seed"], row["echo_variant"], row["echo_factor"], row["times_new"]): row["loss_after"]
        for row in rows
        if row["fresh_examples"] == at
    }
    seeds = sorted({seed for seed, *_ in of_branch})
    return np.array([of_branch[seed, "none", 1, 1] - of_branch[seed, *branch] for seed in seeds])


def readings(rows: Sequence[Row]) -> list[Row]:
    """A row for each echoed branch and checkpoint, and last the task's verdict."""
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
    """Does gradient noise tell a repeat's worth? The three readings of README.md, with this worth.

    Of each run and checkpoint a worth is its gain over the mean over runs of what as many new examples gain;
    a signal is the batch's mu^2 over that part of sigma^2 which a repeat has in common with its first use.
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
    """Spearman's correlation of each row with the same row, [rows]."""
    return np.array([stats.spearmanr(*pair).statistic for pair in zip(ours, theirs, strict=True)])


def _beyond(signal: Numbers, worth: Numbers) -> Numbers:
    """Spearman's correlation over runs, averaged over checkpoints, as what each pair of runs adds to it."""

    def standardised(values: Numbers) -> Numbers:
        ranks = stats.rankdata(values, axis=0)
        ranks = ranks - ranks.mean(0)
        scaled: Numbers = ranks / np.sqrt((ranks**2).sum(0))
        return scaled

    products: Numbers = standardised(signal) @ standardised(worth).T / signal.shape[1]
    return products


def _permuted(products: Numbers) -> Row:
    """The correlation, and its one-sided p by which run's noise is held against which run's branches."""
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


def measured(seed: int, runs: Path, work: Workload, subject: Subject) -> dict[str, Any]:
    """The record of one run, measured unless it lies there already."""
    path = runs / f"{seed}.json"
    if not path.exists():
        made_by = {key: value for key, value in environment().items() if key != "slurm"}
        rows = [
            {
                key: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
                for key, value in row.items()
            }
            for row in run(work, subject, seed)
        ]
        write_json(path, {"environment": made_by, "rows": rows})
        print(f"run {seed} has ended", flush=True)
    found: dict[str, Any] = read_json(path)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=SUBJECTS)
    parser.add_argument("overrides", nargs="*", help="data.path=FOLDER of the text")
    parser.add_argument("--runs", type=Path, default=Path("runs/equal_steps"), help="a file for each run")
    parser.add_argument("--results", type=Path, default=Path("runs/results/equal_steps"))
    parser.add_argument("--trial", type=int, help="one small run of this seed, which is kept nowhere")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with report_errors():
        subject = SUBJECTS[options.task]
        work = workload(subject, options.overrides)
        if options.trial is not None:
            small = replace(subject, checkpoints=(64, 128), fresh=64, continuations=1)
            print(one_line_each(run(work, small, options.trial)))
            return
        runs = options.runs / options.task
        with folder_errors(runs):
            runs.mkdir(parents=True, exist_ok=True)
        try:
            records = [measured(seed, runs, work, subject) for seed in SEEDS]
        except KeyboardInterrupt:
            print("interrupted; the same command continues", file=sys.stderr)
            sys.exit(130)
        write(records, options.results / options.task, options.task)


def write(records: Sequence[dict[str, Any]], results: Path, task: str) -> None:
    """The tables of all runs, and where they come from."""
    made_by: list[dict[str, Any]] = []
    for record in records:
        made_by += [record["environment"]] if record["environment"] not in made_by else []
    rows = [row for record in records for row in record["rows"]]
    found = readings(rows) + (correlations(rows) if SUBJECTS[task].noise else [])
    texts = {"worths.json": table_text(rows), "outcome.json": one_line_each(found)}
    data = " data.path=FOLDER_OF_IMDB_TEXT" if task == "text" else ""
    commands = [f"python -m experiments.repeat_value.equal_steps {task}{data}"]
    write_tables(results, texts, {"commands": commands, "environments": made_by})
    write_text(results / "worths.json", texts["worths.json"])  # no table of a sweep
    print(results)


if __name__ == "__main__":
    main()
