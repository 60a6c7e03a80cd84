"""Mean average precision of detections, by COCO's rules: faster-coco-eval counts, in memory."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from faster_coco_eval import COCO, COCOeval_faster
from numpy.typing import NDArray

from adaecho.datasets.coco import TrueBoxes
from adaecho.tasks.base import Direction

# COCOeval's summary by position; it gives -1 where there is nothing to find.
_SUMMARY = {"mAP": 0, "mAP_50": 1, "mAP_75": 2, "mAP_small": 3, "mAP_medium": 4, "mAP_large": 5}
_TEN_THRESHOLDS_HALF = 0  # IoU 0.5 is the first of COCO's ten


@dataclass(frozen=True)
class Found:
    """One image's detections: boxes [K, 4] as x1, y1, x2, y2, scores float [K], labels int [K] from 1."""

    boxes: NDArray[Any]
    scores: NDArray[Any]
    labels: NDArray[Any]


class AveragePrecision:
    """COCO's metrics against the true boxes of a split.

    Args:
        truths: boxes of each image.
        sizes: height and width of each image, in the pixels of the boxes.
        categories: names; label k is the name k - 1.
        per_category: report AP at IoU 0.5 of each category too.

    Attributes:
        metrics: what ``measure`` reports. mAP averages over IoU 0.5, 0.55, ..., 0.95, mAP_50 and mAP_75 are
            at one; small, medium and large objects (to 32**2, to 96**2, larger; in pixels) and categories
            are there where the split has any, since COCO's code gives -1 for those that it hasn't.
    """

    def __init__(
        self,
        truths: Sequence[TrueBoxes],
        sizes: Sequence[tuple[int, int]],
        categories: Sequence[str],
        *,
        per_category: bool = False,
    ) -> None:
        self._number, self._categories, self._per_category = len(truths), list(categories), per_category
        content = as_coco(truths, sizes, categories)
        with contextlib.redirect_stdout(io.StringIO()):
            self._truth = COCO(content)
        nothing = self._evaluate([])
        self.metrics: dict[str, Direction] = {
            name: "max" for name, value in nothing.items() if value >= 0 or name == "mAP"
        }

    def measure(self, found: Sequence[Found]) -> dict[str, float]:
        """The metrics of what was found in each image, in the order of ``truths``; fractions."""
        assert len(found) == self._number
        values = self._evaluate(as_results(found))
        return {name: max(values[name], 0.0) for name in self.metrics}

    def _evaluate(self, results: list[dict[str, Any]]) -> dict[str, float]:
        with contextlib.redirect_stdout(io.StringIO()):
            detected = self._truth.loadRes(results)
            evaluation = COCOeval_faster(self._truth, detected, "bbox", print_function=lambda *_: None)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        values = {name: float(evaluation.stats[index]) for name, index in _SUMMARY.items()}
        if self._per_category:
            # [IoU, recall, category, area, detections]; all areas, the most detections.
            precision = evaluation.eval["precision"][_TEN_THRESHOLDS_HALF, :, :, 0, -1]
            for index, name in enumerate(self._categories):
                values[f"AP_50/{name}"] = float(precision[:, index].mean())
        return values


def as_coco(
    truths: Sequence[TrueBoxes], sizes: Sequence[tuple[int, int]], categories: Sequence[str]
) -> dict[str, Any]:
    """True boxes in COCO's schema."""
    annotations: list[dict[str, Any]] = []
    for image, truth in enumerate(truths):
        columns = (truth.boxes, truth.labels, truth.crowd, truth.areas)
        for (x1, y1, x2, y2), label, crowd, area in zip(*(c.tolist() for c in columns), strict=True):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": label,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": area,
                    "iscrowd": int(crowd),
                }
            )
    return {
        "info": {},
        "images": [
            {"id": image, "height": height, "width": width} for image, (height, width) in enumerate(sizes)
        ],
        "annotations": annotations,
        "categories": [{"id": label, "name": name} for label, name in enumerate(categories, start=1)],
    }


def as_results(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Detections in COCO's schema."""
    return [
        {"image_id": image, "category_id": label, "bbox": [x1, y1, x2 - x1, y2 - y1], "score": score}
        for image, one in enumerate(found)
        for (x1, y1, x2, y2), score, label in zip(
            one.boxes.tolist(), one.scores.tolist(), one.labels.tolist(), strict=True
        )
    ]
