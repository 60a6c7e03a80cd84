"""What all figures share: size, colours, words, numbers, and files that repeat byte for byte."""

import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from adaecho.errors import warn
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
_DPI = 150

_RC: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "svg.hashsalt": "adaecho",  # ids in SVG are random otherwise
    "text.color": INK,
    "text.parse_math": False,  # names of classes and arms are anyone's
    "xtick.color": INK,
    "ytick.color": INK,
    "ytick.labelsize": 8.5,
}


@contextmanager
def figure(height_inches: float, path: Path, title: str = "", note: str = "") -> Iterator[Figure]:
    """A figure drawn inside the block and saved at its end; matplotlib's global settings stay as they are.

    Args:
        height_inches: the width is fixed.
        path: its suffix decides the format (png, jpg, svg, pdf); the folder is made if missing.
        title: above it, at the left.
        note: below it, in small letters.
    """
    # A user's own defaults don't count; touching the backend's would start one.
    default: Any = {
        key: matplotlib.rcParamsDefault[key] for key in matplotlib.rcParamsDefault if key != "backend"
    }
    with matplotlib.rc_context({**default, **_RC}):
        drawing = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
        yield drawing
        if title:
            drawing.suptitle(title, x=0.01, ha="left", fontsize=10)
        if note:
            drawing.supxlabel(note, fontsize=7.5, color=MUTED, x=0.01, ha="left")
        _find_letters(drawing)
        path.parent.mkdir(parents=True, exist_ok=True)
        dated = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix)
        with atomic_file(path, durable=False) as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # told already
            drawing.savefig(file, format=path.suffix[1:], dpi=_DPI, metadata=dated and {dated: None})


def _find_letters(drawing: Figure) -> None:
    """Give texts in scripts that matplotlib's font lacks a font of this machine; tell where none has one."""
    own = _letters_of(font_manager.findfont(_RC["font.family"]))
    told: set[str] = set()
    for text in drawing.findobj(Text):
        assert isinstance(text, Text)
        wanted = {ord(letter) for letter in text.get_text() if not letter.isspace()} - own
        if not wanted:
            continue
        fonts, missing = _fonts_with(frozenset(wanted))
        text.set_fontfamily([_RC["font.family"], *fonts])
        if missing and missing not in told:
            told.add(missing)
            warn(
                f"no font here has {missing}, as in {text.get_text()!r}: drawn as boxes; install one, "
                "e.g. Noto's of that script"
            )


@functools.cache
def _fonts_with(wanted: frozenset[int]) -> tuple[list[str], str]:
    """Fonts, by their families, that have these letters together, and those letters that none has."""
    left, fonts = set(wanted), []
    for entry in sorted(font_manager.fontManager.ttflist, key=lambda entry: (entry.name, entry.fname)):
        is_plain = entry.style == "normal" and entry.weight in (400, "normal", "regular")
        is_other = entry.name != _RC["font.family"] and not entry.name.startswith(
            "Last"
        )  # draws boxes for all
        found = left & _letters_of(entry.fname) if left and is_plain and is_other else set()
        if found:
            left -= found
            fonts.append(entry.name)
    return fonts, "".join(map(chr, sorted(left)))


@functools.cache
def _letters_of(font: str) -> frozenset[int]:
    try:
        return frozenset(font_manager.get_font(font).get_charmap())
    except (OSError, RuntimeError):  # removed since the fonts were listed, or of no form that is read
        return frozenset()


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


def count_scale(largest: float) -> tuple[float, str]:
    """What to divide large counts by, and the unit's name for the axis label."""
    if largest >= 1e6:
        return 1e6, " (millions)"
    return (1e3, " (thousands)") if largest >= 1e4 else (1.0, "")


def count_formatter(scale: float) -> FuncFormatter:
    """Tick labels with thousands separators and no needless decimals."""
    return FuncFormatter(lambda value, _: f"{value / scale:,.10g}")


def count_axis(axes: Axes, words: str, along: Literal["x", "y"] = "y") -> None:
    """Lay out an axis of counts: its words with their unit, few ticks, and a grid behind what is drawn."""
    axis = axes.yaxis if along == "y" else axes.xaxis
    scale, unit = count_scale(axis.get_view_interval()[1])
    axis.set_label_text(f"{words}{unit}")
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(count_formatter(scale))
    axes.grid(axis=along, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
