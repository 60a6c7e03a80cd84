"""The size, colors, labels and number formats that all figures share."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from adaecho.records.files import atomic_file

# The variants are in the paper's order. Okabe and Ito's colors can be distinguished with every kind of
# color vision, and in grayscale.
VARIANTS = {
    "none": ("baseline", "#555555"),
    "batch": ("batch echoing", "#56B4E9"),
    "example_after_augmentation": ("example echoing after augmentation", "#E69F00"),
    "example_before_augmentation": ("example echoing before augmentation", "#009E73"),
    "example": ("example echoing", "#009E73"),  # for tasks without augmentation
}
# Colors of other series. No variant has any of these colors, so a color has the same meaning in every figure.
SERIES = ("#0072B2", "#D55E00", "#CC79A7", "#7A5C00", "#5E3C99", "#000000")
INK, MUTED, FAINT = "#222222", "#595959", "#8a8a8a"
WIDTH_INCHES = 7.2  # 1,080 pixels, the width of a README on a high-resolution screen

_STYLE = Path(__file__).with_name("figures.mplstyle")


@contextmanager
def figure(height_inches: float, path: Path, title: str = "", note: str = "") -> Iterator[Figure]:
    """Yield a figure, and save it at the end of the block. The user's matplotlib settings have no effect.

    Args:
        path: file to write, as png, jpg, svg or pdf. Its folder is created if missing.
        note: small text below the figure.
    """
    with matplotlib.style.context(["default", _STYLE]):
        drawing = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
        yield drawing
        drawing.suptitle(title, x=0.01, ha="left", fontsize=10)
        drawing.supxlabel(note, fontsize=7.5, color=MUTED, x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        dated = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix)
        with atomic_file(path) as file:
            drawing.savefig(file, format=path.suffix[1:], metadata=dated and {dated: None})


def variant_order(variant: str) -> int:
    """Return a sort key that puts echo variants into the order of the paper's figures."""
    return list(VARIANTS).index(variant)


def factor_order(factor: float | str) -> float:
    """Return a sort key for echoing factors. The factor ``auto`` comes last."""
    return math.inf if factor == "auto" else float(factor)


def target_words(metric: str, value: float | None) -> str:
    """Describe a target in words, e.g. ``97% validation accuracy``."""
    name = f"validation {metric.replace('mAP_', 'mAP@').replace('_', ' ')}"
    if value is None:
        return name
    return f"{100 * value:g}% {name}" if metric == "accuracy" else f"{name} of {value:g}"


def per_cent(value: float, _: int = 0) -> str:
    """Format a fraction as a tick label in percent."""
    return f"{100 * value:.4g}%"


def counts(axes: Axes, words: str, along: Literal["x", "y"]) -> None:
    """Set the label, ticks (such as 20k and 1M) and grid of an axis that shows counts."""
    axis = axes.yaxis if along == "y" else axes.xaxis
    axis.set_label_text(words)
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis=along)
