"""Draw a grid of images with their true and predicted boxes or labels."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from adaecho.figures.style import SERIES, WIDTH_INCHES, figure

Box = tuple[tuple[float, float, float, float], str]
"""x1, y1, x2, y2 in pixels, and a label."""

Shown = tuple[Any, str, Sequence[Box] | None, Sequence[Box] | None]
"""Image uint8 [H, W, 1 or 3], title, true boxes and predicted boxes (None for tasks without boxes)."""

_TRUE, _PREDICTED = SERIES[0], SERIES[1]
_COLUMNS = 4


def grid(shown: Sequence[Shown], path: Path) -> None:
    """Draw a grid of images with up to four panels per row.

    For detection, each image's true and predicted boxes have separate panels.
    """
    panels: list[tuple[Any, str, Sequence[Box], str]] = []
    for image, title, true, predicted in shown:
        if true is None or predicted is None:
            panels.append((image, title, (), _TRUE))
        else:
            panels.append((image, f"{title}\ntrue".strip(), true, _TRUE))
            panels.append((image, f"{title}\npredicted".strip(), predicted, _PREDICTED))
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    with figure(rows * (WIDTH_INCHES / columns * 0.9 + 0.35), path) as drawing:
        axes = drawing.subplots(rows, columns, squeeze=False).flatten()
        for axis in axes:
            axis.set_axis_off()
        for axis, (image, title, boxes, color) in zip(axes, panels, strict=False):
            axis.imshow(image.squeeze(), cmap="gray", interpolation="nearest")
            axis.set_title(title, fontsize=7)
            for box in boxes:
                _draw(axis, box, color)


def _draw(axis: Axes, box: Box, color: str) -> None:
    (x1, y1, x2, y2), text = box
    axis.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=color, linewidth=1.2))
    # Near the top of the image, a label above the box would be cut off, so it is written inside the box.
    below_border = y1 < 0.06 * axis.get_ylim()[0]
    axis.text(
        x1, y1, text, fontsize=5.5, color="white", clip_on=True,
        verticalalignment="top" if below_border else "bottom",
        bbox={"facecolor": color, "edgecolor": "none", "pad": 0.6},
    )  # fmt: skip
