"""What all figures share: size, colours, words, numbers, and files that repeat byte for byte."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from adaecho.records.files import atomic_file

# Paper order. Okabe and Ito's palette: told apart with every kind of colour vision, and in grey by lightness.
VARIANTS = {
    "none": ("baseline", "#555555"),
    "batch": ("batch echoing", "#56B4E9"),
    "example_after_augmentation": ("example echoing after augmentation", "#E69F00"),
    "example_before_augmentation": ("example echoing before augmentation", "#009E73"),
    "example": ("example echoing", "#009E73"),  # of a task without augmentation: before it is after it
}
# Of what stands for anything else: none is a variant's, so that a colour means the same in every figure.
SERIES = ("#0072B2", "#D55E00", "#CC79A7", "#7A5C00", "#5E3C99", "#000000")
INK, MUTED, FAINT = "#222222", "#595959", "#8a8a8a"
WIDTH_INCHES = 7.2  # 1,080 pixels: a README's width on a dense screen

_RC: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.hashsalt": "adaecho",  # ids in SVG are random otherwise
    "text.color": INK,
    "text.parse_math": False,  # names of classes and arms are anyone's
    "xtick.color": INK,
    "ytick.color": INK,
    "ytick.labelsize": 8.5,
}


@contextmanager
def figure(height_inches: float, path: Path, title: str = "", note: str = "") -> Iterator[Figure]:
    """A figure drawn inside the block and saved at its end, the same whatever a user's own defaults are.

    Args:
        height_inches: the width is fixed.
        path: its suffix decides the format (png, jpg, svg, pdf); the folder is made if missing.
        title: above it, at the left.
        note: below it, in small letters.
    """
    with matplotlib.style.context(["default", _RC]):
        drawing = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
        yield drawing
        drawing.suptitle(title, x=0.01, ha="left", fontsize=10)
        drawing.supxlabel(note, fontsize=7.5, color=MUTED, x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        dated = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix)
        with atomic_file(path) as file:
            drawing.savefig(file, format=path.suffix[1:], metadata=dated and {dated: None})


def variant_order(variant: str) -> int:
    """Position of an echo variant in the paper's figures."""
    return list(VARIANTS).index(variant)


def factor_order(factor: float | str) -> float:
    """Position of an echoing factor; ``auto`` comes last."""
    return math.inf if factor == "auto" else float(factor)


def target_words(metric: str, value: float | None) -> str:
    """A target as a reader says it, e.g. ``97 % validation accuracy``."""
    name = f"validation {metric.replace('mAP_', 'mAP@').replace('_', ' ')}"
    if value is None:
        return name
    return f"{100 * value:g} % {name}" if metric == "accuracy" else f"{name} of {value:g}"


def per_cent(value: float, _: int = 0) -> str:
    """A share as a tick's label."""
    return f"{100 * value:.4g} %"


def counts(axes: Axes, words: str, along: Literal["x", "y"]) -> None:
    """Lay out an axis of counts: its words, few ticks (20k, 1M), and a grid behind what is drawn."""
    axis = axes.yaxis if along == "y" else axes.xaxis
    axis.set_label_text(words)
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis=along)
