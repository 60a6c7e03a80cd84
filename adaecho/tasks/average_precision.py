"""Compute mean average precision (mAP) by COCO's rules, with the library faster-coco-eval."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from faster_coco_eval import COCO, COCOeval_faster

from adaecho.datasets.coco import GroundTruth
from adaecho.models.ssd import Detections
from adaecho.tasks.base import Direction

Found = tuple[int, Detections]
"""The row of an image in its split, and the detections in this image, in pixels of the image."""

# Positions of the metrics in COCOeval's summary, which contains -1 for a metric without any objects.
_SUMMARY = {"mAP": 0, "mAP_50": 1, "mAP_75": 2, "mAP_small": 3, "mAP_medium": 4, "mAP_large": 5}
_IOU_HALF = 0  # index of 0.5 among COCO's ten IoU thresholds


class AveragePrecision:
    """COCO's detection metrics, which compare detections with the true boxes of a split.

    Args:
        truths: the true boxes of each image.
        sizes: the height and width of each image, in the same pixels as the boxes.
        categories: the names of the categories. Label k stands for ``categories[k - 1]``.
        per_category: whether to report the average precision (AP) of each category at IoU 0.5 too.

    Attributes:
        metrics: maps the name of each reported metric to "max". Metrics of object sizes or categories that do
            not occur are left out.
    """

    def __init__(
        self,
        truths: Sequence[GroundTruth],
        sizes: Sequence[tuple[int, int]],
        categories: Sequence[str],
        *,
        per_category: bool = False,
    ) -> None:
        self._categories, self._per_category = list(categories), per_category
        with contextlib.redirect_stdout(io.StringIO()):
            self._truth = COCO(as_coco(truths, sizes, categories))
        nothing = self._evaluate([], range(len(truths)))
        self.metrics: dict[str, Direction] = {
            name: "max" for name, value in nothing.items() if value >= 0 or name == "mAP"
        }

    def measure(self, found: Sequence[Found]) -> dict[str, float]:
        """Return the metrics as fractions, computed over the images in ``found``."""
        values = self._evaluate(as_results(found), [row for row, _ in found])
        return {name: max(values[name], 0.0) for name in self.metrics}

    def _evaluate(self, results: list[dict[str, Any]], rows: Sequence[int]) -> dict[str, float]:
        with contextlib.redirect_stdout(io.StringIO()):
            detected = self._truth.loadRes(results)
            evaluation = COCOeval_faster(self._truth, detected, "bbox", print_function=lambda *_: None)
            evaluation.params.imgIds = sorted(rows)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        values = {name: float(evaluation.stats[index]) for name, index in _SUMMARY.items()}
        if self._per_category:
            # The axes are [IoU, recall, category, area, detections]. Index 0 of the area stands for all
            # areas, and the last index of the detections for the largest allowed number per image.
            precision = evaluation.eval["precision"][_IOU_HALF, :, :, 0, -1]
            means = (float(precision[:, index].mean()) for index in range(len(self._categories)))
            values |= {f"AP_50/{name}": mean for name, mean in zip(self._categories, means, strict=True)}
        return values


def as_coco(
    truths: Sequence[GroundTruth], sizes: Sequence[tuple[int, int]], categories: Sequence[str]
) -> dict[str, Any]:
    """Convert the true boxes of all images to COCO's annotation format."""
    boxes = [
        {
            "image_id": image,
            "category_id": label,
            "bbox": _corner_and_size(box),
            "area": area,
            "iscrowd": crowd,
        }
        for image, truth in enumerate(truths)
        for box, label, area, crowd in _rows(truth.boxes, truth.labels, truth.areas, truth.crowd.astype(int))
    ]
    return {
        "info": {},
        "images": [
            {"id": row, "height": height, "width": width} for row, (height, width) in enumerate(sizes)
        ],
        "annotations": [{"id": number, **box} for number, box in enumerate(boxes, start=1)],
        "categories": [{"id": label, "name": name} for label, name in enumerate(categories, start=1)],
    }


def as_results(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Convert detections to COCO's result format."""
    return [
        {"image_id": image, "category_id": label, "bbox": _corner_and_size(box), "score": score}
        for image, one in found
        for box, label, score in _rows(one.boxes, one.labels, one.scores)
    ]


def _rows(*columns: Any) -> Any:
    return zip(*(column.tolist() for column in columns), strict=True)


def _corner_and_size(box: Sequence[float]) -> list[float]:
    x1, y1, x2, y2 = box
    return [x1, y1, x2 - x1, y2 - y1]
