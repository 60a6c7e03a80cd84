"""Does gradient noise tell what a repeat is worth? The readings of experiments/repeat_value, and a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from adaecho.figures.report import laid_out, markdown_table
from adaecho.figures.style import INK, MUTED, VARIANTS, figure
from adaecho.records.statistics import mean_interval

Row = dict[str, Any]
Numbers = NDArray[np.float64]
BASELINE = ("none", 1)
VARIANTS_ECHOED = ("batch", "example_after_augmentation", "example_before_augmentation")
FACTORS = (2, 4)
BRANCHES = tuple((variant, factor) for factor in FACTORS for variant in VARIANTS_ECHOED)
BATCH_SIZE = 32
LEVEL = 0.05 / 3  # of each of three readings: all three together are wrong in 5 % of cases
_PERMUTATIONS = 10_000
_ALONG, _BEYOND, _SPLIT = (
    "noise tells a repeat's worth along a run",
    "it tells more than how far the run is",
    "the noise within copies tells what new augmentation adds",
)
_DASHED: Any = (0, (4, 2))
_PREDICTS, _DOES_NOT, _REVERSED = "predicts", "does not", "the reverse"


class Measured(NamedTuple):
    """What all runs measured at the checkpoints where new examples lower the mean loss.

    Attributes:
        fresh_examples: read before each checkpoint, [checkpoints].
        loss: at each checkpoint, [runs, checkpoints].
        worth: of a repeat in new examples: by how much a branch ended below the one without echoing, over
            e - 1 times what the latter gained on average over runs; [branches, runs, checkpoints].
        signal: mu^2 of a batch over that part of its sigma^2 which a repeat has in common with the first
            use; the same shape.
        within: the noise within copies over mu^2, negated and inverted: it rises; [runs, checkpoints].
        noise: sigma^2 / mu^2 of a batch and the part of it between examples, each [runs, checkpoints].
    """

    fresh_examples: NDArray[np.int64]
    loss: Numbers
    worth: Numbers
    signal: Numbers
    within: Numbers
    noise: tuple[Numbers, Numbers]


def measured(rows: Sequence[Row]) -> Measured:
    """What the rows of ``branches.json`` hold, as arrays."""
    seeds = sorted({row["seed"] for row in rows})
    positions = sorted({row["fresh_examples"] for row in rows})
    of_branch = {
        (row["echo_variant"], row["echo_factor"], row["seed"], row["fresh_examples"]): row for row in rows
    }

    def table(key: str, branch: tuple[str, int] = BASELINE) -> Numbers:
        return np.array([[of_branch[*branch, seed, at][key] for at in positions] for seed in seeds])

    loss, plain = table("loss_before"), table("loss_after")
    gain = (loss - plain).mean(0)  # [checkpoints]
    kept = gain > 0
    between, within, square = (table(key)[:, kept] for key in ("between", "within", "square"))
    in_common = dict.fromkeys(VARIANTS_ECHOED, between + within)
    in_common["example_before_augmentation"] = between
    worth = [(plain - table("loss_after", branch))[:, kept] / (branch[1] - 1) for branch in BRANCHES]
    return Measured(
        np.array(positions)[kept],
        loss[:, kept],
        np.stack(worth) / gain[kept],
        np.stack([BATCH_SIZE * square / in_common[variant] for variant, _ in BRANCHES]),
        -square / within,
        ((between + within) / square / BATCH_SIZE, between / square / BATCH_SIZE),
    )


def standardised_ranks(values: Numbers, axis: int) -> Numbers:
    """Ranks along an axis, ties shared, with mean 0 and length 1: their products sum to Spearman's rho.

    Values that are all equal have ranks of 0, and so no correlation.
    """
    from scipy import stats

    ranks = np.asarray(stats.rankdata(values, axis=axis), float)  # of values' shape
    ranks -= ranks.mean(axis, keepdims=True)
    length = np.sqrt((ranks**2).sum(axis, keepdims=True))
    found: Numbers = ranks / np.where(length > 0, length, 1.0)
    return found


def along_runs(predictor: Numbers, value: Numbers) -> Numbers:
    """Spearman's correlation of each run over its checkpoints, averaged over branches; [runs].

    Args:
        predictor, value: [branches, runs, checkpoints]; of the first the branches may be left out.
    """
    product = standardised_ranks(predictor, -1) * standardised_ranks(value, -1)
    found: Numbers = product.sum(-1).mean(0)
    return found


def beyond_position(predictor: Numbers, value: Numbers) -> tuple[float, float]:
    """Spearman's correlation over the runs at each checkpoint, averaged; and its one-sided p.

    By permutation of which run's noise is held against which run's branches, at all checkpoints alike.

    Args:
        predictor, value: [branches, runs, checkpoints].
    """
    ours, theirs = (standardised_ranks(array, 1) for array in (predictor, value))
    number = ours.shape[0] * ours.shape[2]
    products = np.einsum("bic,bjc->ij", ours, theirs) / number  # of run i's noise with run j's worths
    runs, rng = np.arange(len(products)), np.random.default_rng(0)
    found = float(products[runs, runs].sum())
    drawn = [products[runs, rng.permutation(runs)].sum() for _ in range(_PERMUTATIONS)]
    # The right order is one of those that chance could bring.
    return found, (1 + sum(one >= found - 1e-12 for one in drawn)) / (1 + _PERMUTATIONS)


def readings(rows: Sequence[Row]) -> list[Row]:
    """The three that the rule decides, then those that it doesn't, as dicts for ``outcome.json``."""
    found = measured(rows)
    rho, p = beyond_position(found.signal, found.worth)
    after, before = found.worth[1::3], found.worth[2::3]  # [factors, runs, checkpoints]
    not_read = -np.broadcast_to(found.fresh_examples.astype(float), found.loss.shape)
    return [
        _with_interval(_ALONG, along_runs(found.signal, found.worth), decides=True),
        {"reading": _BEYOND, "correlation": rho, "p": p, "verdict": _PREDICTS if p < LEVEL else _DOES_NOT},
        _with_interval(_SPLIT, along_runs(found.within, before - after), decides=True),
        *(
            _with_interval(f"{_ALONG}: {variant}, e = {factor}", along_runs(signal[None], worth[None]))
            for (variant, factor), signal, worth in zip(BRANCHES, found.signal, found.worth, strict=True)
        ),
        _with_interval("in place of noise, how little has been read", along_runs(not_read, found.worth)),
        _with_interval("in place of noise, the loss", along_runs(found.loss, found.worth)),
    ]


def _with_interval(name: str, of_runs: Numbers, *, decides: bool = False) -> Row:
    low, high = mean_interval(of_runs.tolist(), 1 - LEVEL)
    row = {"reading": name, "correlation": float(of_runs.mean()), "low": low, "high": high}
    verdict = _PREDICTS if low > 0 else _REVERSED if high < 0 else _DOES_NOT
    return {**row, "verdict": verdict} if decides else row


def draw_branches(rows: Sequence[Row], path: Path, title: str) -> None:
    """Along the runs. Left: noise, medians; right: worths, means with 95 % intervals over runs.

    Args:
        rows: of ``branches.json``.
        path: file to write; its suffix decides the format.
        title: what was trained.
    """
    found = measured(rows)
    with figure(3.9, path, title) as drawing:
        noise, worth = drawing.subplots(1, 2)
        for axes in (noise, worth):
            axes.set_xscale("log", base=2)
            axes.set_xticks(found.fresh_examples, [f"{at:,}" for at in found.fresh_examples], rotation=60)
            axes.minorticks_off()
            axes.set_xlabel("fresh examples read before")
            axes.grid(color="#dddddd", linewidth=0.6)
        for values, name, line in zip(
            found.noise, ("all of it", "between examples"), ("-", _DASHED), strict=True
        ):
            noise.plot(found.fresh_examples, np.median(values, 0), color=INK, linestyle=line, label=name)
        noise.set_ylim(0, None)
        noise.set_ylabel("σ² / μ² of a batch, median of runs")
        noise.legend(frameon=False, fontsize=8.5)
        _draw_worth(worth, found)
        names = [
            Line2D([], [], color=VARIANTS[variant][1], label=VARIANTS[variant][0])
            for variant in VARIANTS_ECHOED
        ]
        drawing.legend(handles=names, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)


def _draw_worth(axes: Axes, found: Measured) -> None:
    for (variant, factor), worth in zip(BRANCHES, found.worth, strict=True):
        means = worth.mean(0)
        ends = np.array([mean_interval(of_runs.tolist()) for of_runs in worth.T])  # [checkpoints, 2]
        marker, line = ("o", "-") if factor == FACTORS[0] else ("s", _DASHED)
        axes.errorbar(
            found.fresh_examples, means, np.abs(ends.T - means), color=VARIANTS[variant][1],
            marker=marker, linestyle=line, markersize=4, linewidth=1.1, capsize=2,
        )  # fmt: skip
    for level, words in ((0, "nothing"), (1, "a new\nexample")):
        axes.axhline(level, color=MUTED, linewidth=0.8, zorder=0)
        axes.annotate(
            words, (1, level), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
            va="center", fontsize=8, color=MUTED,
        )  # fmt: skip
    axes.set_ylabel("worth of a repeat (e = 2; dashed: e = 4)")


def section_of_branches(title: str, rows: Sequence[Row], figure: str, commands: Sequence[str]) -> str:
    """The Markdown of the readings; ``figure`` as the report links it."""
    cells = [
        (
            row["reading"],
            f"{row['correlation']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}" if "low" in row else f"p = {row['p']:.2g}",
            row.get("verdict", "-"),
        )
        for row in readings(rows)
    ]
    headings = ("reading", "rank correlation", f"{100 * (1 - LEVEL):.1f} % interval", "by the rule")
    return laid_out(title, [figure], markdown_table(headings, cells), commands=commands)
