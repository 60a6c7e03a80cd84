"""mAP by faster-coco-eval against pycocotools."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from adaecho.datasets.coco import GroundTruth
from adaecho.models.ssd import Detections
from adaecho.tasks.average_precision import AveragePrecision, Found, as_coco, as_results

CATEGORIES = ["cat", "dog", "bird"]
SIZES = [(400, 500)] * 12
# None of the true boxes is smaller than 32**2 pixels.
NAMES = ["mAP", "mAP_50", "mAP_75", "mAP_medium", "mAP_large"]


def _truths(seed: int = 0, crowd_share: float = 0.0) -> list[GroundTruth]:
    rng = np.random.default_rng(seed)
    truths = []
    for _ in SIZES:
        number = rng.integers(0, 6)
        corner, side = rng.uniform(0, 250, (number, 2)), rng.uniform(40, 140, (number, 2))
        boxes = np.concatenate([corner, corner + side], axis=1).astype(np.float32)
        crowd = rng.random(number) < crowd_share
        truths.append(GroundTruth(boxes, rng.integers(1, 4, number), crowd, side.prod(axis=1)))
    return truths


def _found(
    truths: Sequence[GroundTruth], *, shift: float = 0.0, seed: int = 1, ties: bool = False
) -> list[Found]:
    """The true boxes moved by up to ``shift`` pixels, scores at random; if moved, as many wrong ones."""
    rng = np.random.default_rng(seed)

    def one(row: int, truth: GroundTruth) -> Found:
        moved = rng.uniform(-shift, shift, (len(truth.boxes), 1)).astype(np.float32)
        boxes, labels = truth.boxes + moved, truth.labels
        if shift:
            boxes, labels = np.concatenate([boxes, boxes[::-1]]), np.concatenate([labels, labels % 3 + 1])
        scores = rng.integers(1, 4, len(boxes)) / 4 if ties else rng.random(len(boxes))
        return detected(row, boxes, scores, labels)

    return [one(row, truth) for row, truth in enumerate(truths)]


def detected(row: int, boxes: Any, scores: Any, labels: Any) -> Found:
    return row, Detections(*(torch.from_numpy(one) for one in (boxes, scores, labels)))


def _oracle(truths: Sequence[GroundTruth], found: Sequence[Found]) -> dict[str, float]:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = as_coco(truths, SIZES, CATEGORIES)
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(as_results(found)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    names = ["mAP", "mAP_50", "mAP_75", "mAP_small", "mAP_medium", "mAP_large"]
    return dict(zip(names, evaluation.stats, strict=False))


@pytest.mark.parametrize("shift", [0.0, 6.0, 25.0])
@pytest.mark.parametrize("crowd_share", [0.0, 0.4])
@pytest.mark.parametrize("ties", [False, True])
def test_it_agrees_with_pycocotools_and_prints_nothing(
    capsys: pytest.CaptureFixture[str], shift: float, crowd_share: float, ties: bool
) -> None:
    truths = _truths(crowd_share=crowd_share)
    found = _found(truths, shift=shift, ties=ties)
    ours = AveragePrecision(truths, SIZES, CATEGORIES).measure(found)
    assert capsys.readouterr() == ("", "")
    theirs = _oracle(truths, found)
    assert list(ours) == NAMES
    assert ours == pytest.approx({name: theirs[name] for name in NAMES}, abs=1e-9)
    assert 0 < ours["mAP"] < 1 if shift else ours == {name: pytest.approx(1) for name in NAMES}


def test_no_detections_have_precision_zero() -> None:
    truths = _truths()
    none = (np.zeros((0, 4)), np.zeros(0), np.zeros(0, int))
    nothing = [detected(row, *none) for row in range(len(truths))]
    assert AveragePrecision(truths, SIZES, CATEGORIES).measure(nothing) == dict.fromkeys(NAMES, 0.0)


def test_sizes_and_categories_without_objects_are_left_out() -> None:
    truths = [GroundTruth(t.boxes, np.minimum(t.labels, 2), t.crowd, t.areas) for t in _truths()]
    metrics = AveragePrecision(truths, SIZES, CATEGORIES, per_category=True).metrics
    assert "mAP_small" not in metrics
    assert "AP_50/dog" in metrics
    assert "AP_50/bird" not in metrics
    assert set(metrics.values()) == {"max"}


def test_a_category_has_its_own_precision() -> None:
    truths = _truths()
    no_dogs = [truth.labels != 2 for truth in truths]
    found = [
        detected(row, truth.boxes[kept], np.ones(kept.sum()), truth.labels[kept])
        for row, (truth, kept) in enumerate(zip(truths, no_dogs, strict=True))
    ]
    measured = AveragePrecision(truths, SIZES, CATEGORIES, per_category=True).measure(found)
    assert measured["AP_50/cat"] == pytest.approx(1.0)
    assert measured["AP_50/dog"] == 0
    assert measured["mAP_50"] == pytest.approx(2 / 3)


def test_images_that_are_not_evaluated_do_not_count() -> None:
    truths = _truths()
    found = _found(truths, shift=6.0)
    some = [0, 3, 4, 7, 9]
    ours = AveragePrecision(truths, SIZES, CATEGORIES).measure([found[row] for row in some])
    moved = [(number, found[row][1]) for number, row in enumerate(some)]
    alone = AveragePrecision([truths[row] for row in some], SIZES[:5], CATEGORIES).measure(moved)
    assert ours.items() >= alone.items()
