"""Matching and loss against loops over images and boxes, and against torchvision's per-image SSD."""

from types import SimpleNamespace

import pytest
import torch
from torchvision.models.detection import _utils as detection
from torchvision.models.detection import ssd as torchvision_ssd
from torchvision.ops import box_iou

from adaecho.models.ssd import decode, detect, encode, match, multibox_loss, small_ssd

C = 4


def _boxes(number: int, generator: torch.Generator, side: float = 64) -> torch.Tensor:
    corner = torch.rand(number, 2, generator=generator) * side * 0.7
    size = 4 + torch.rand(number, 2, generator=generator) * side * 0.4
    return torch.cat([corner, corner + size], 1)


@pytest.fixture
def batch() -> SimpleNamespace:
    """Images with 3, 0, 1 and 5 boxes among the small SSD's default boxes."""
    generator = torch.Generator().manual_seed(0)
    default = small_ssd(C).boxes
    truths = [_boxes(number, generator) for number in (3, 0, 1, 5)]
    kinds = [torch.randint(1, C, (len(boxes),), generator=generator) for boxes in truths]
    boxes, labels = torch.zeros(4, 5, 4), torch.zeros(4, 5, dtype=torch.int64)
    for image, (some, kind) in enumerate(zip(truths, kinds, strict=True)):
        boxes[image, : len(some)], labels[image, : len(kind)] = some, kind
    logits = torch.randn(4, len(default), C, generator=generator)
    codes = torch.randn(4, len(default), 4, generator=generator)
    return SimpleNamespace(
        default=default, truths=truths, kinds=kinds, boxes=boxes, labels=labels, logits=logits, codes=codes
    )


def _slow_match(truths: torch.Tensor, default: torch.Tensor, threshold: float) -> list[int]:
    """One box after another, from the definition."""

    def area(box: list[float]) -> float:
        return (box[2] - box[0]) * (box[3] - box[1])

    def iou(one: list[float], other: list[float]) -> float:
        width = min(one[2], other[2]) - max(one[0], other[0])
        height = min(one[3], other[3]) - max(one[1], other[1])
        shared = max(width, 0) * max(height, 0)
        return shared / (area(one) + area(other) - shared)

    overlaps = [[iou(a, b) for b in default.tolist()] for a in truths.tolist()]
    matched = []
    for place in range(len(default)):
        column = [row[place] for row in overlaps]
        best = max(column, default=-1.0)
        matched.append(column.index(best) if best >= threshold else -1)
    for index, row in enumerate(overlaps):
        matched[row.index(max(row))] = index
    return matched


def test_matching_is_that_of_loops_over_images_and_boxes(batch: SimpleNamespace) -> None:
    matched = match(batch.boxes, batch.labels, batch.default)
    assert matched.shape == (4, len(batch.default))
    for image, truths in enumerate(batch.truths):
        assert matched[image].tolist() == _slow_match(truths, batch.default, 0.5)


def test_every_box_is_matched_and_the_last_wins_a_shared_default_box() -> None:
    default = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
    both = torch.tensor([[[0.0, 0, 10, 9], [0, 0, 10, 8], [0, 0, 0, 0]]])
    assert match(both, torch.tensor([[1, 2, 0]]), default).tolist() == [[1, -1]]
    below_the_threshold = torch.tensor([[[8.0, 8, 10, 10]]])
    assert match(below_the_threshold, torch.tensor([[1]]), default).tolist() == [[0, -1]]


def test_a_batch_without_boxes_has_loss_zero(batch: SimpleNamespace) -> None:
    none = batch.boxes[:, :0], batch.labels[:, :0]
    assert (match(*none, batch.default) == -1).all()
    logits = batch.logits.requires_grad_()
    loss, positives = multibox_loss(logits, batch.codes, *none, batch.default)
    loss.backward()
    assert (loss.item(), positives.item()) == (0, 0)
    assert logits.grad is not None


def test_the_loss_and_its_gradients_are_torchvisions(batch: SimpleNamespace) -> None:
    logits, codes = batch.logits.clone().requires_grad_(), batch.codes.clone().requires_grad_()
    loss, positives = multibox_loss(logits, codes, batch.boxes, batch.labels, batch.default)
    (loss / positives).backward()
    slow_logits, slow_codes = batch.logits.clone().requires_grad_(), batch.codes.clone().requires_grad_()
    none = torch.full((len(batch.default),), -1)
    overlaps = [box_iou(truths, batch.default) for truths in batch.truths]
    matched = [detection.SSDMatcher(0.5)(one) if len(one) else none for one in overlaps]
    losses = torchvision_ssd.SSD.compute_loss(
        SimpleNamespace(box_coder=detection.BoxCoder((10.0, 10.0, 5.0, 5.0)), neg_to_pos_ratio=3),
        [{"boxes": b, "labels": k} for b, k in zip(batch.truths, batch.kinds, strict=True)],
        {"cls_logits": slow_logits, "bbox_regression": slow_codes},
        [batch.default] * 4,
        matched,
    )
    expected = losses["bbox_regression"] + losses["classification"]
    expected.backward()
    assert positives.item() == sum(int((m >= 0).sum()) for m in matched)
    torch.testing.assert_close(loss / positives, expected)
    torch.testing.assert_close(logits.grad, slow_logits.grad)
    torch.testing.assert_close(codes.grad, slow_codes.grad)


def test_codes_are_those_of_torchvision_and_decode_back(batch: SimpleNamespace) -> None:
    truths = _boxes(len(batch.default), torch.Generator().manual_seed(1))
    codes = encode(truths, batch.default)
    coder = detection.BoxCoder((10.0, 10.0, 5.0, 5.0))
    torch.testing.assert_close(codes, coder.encode_single(truths, batch.default))
    torch.testing.assert_close(decode(codes, batch.default), truths, rtol=1e-4, atol=1e-3)


def test_detections_of_a_certain_prediction_are_the_true_boxes(batch: SimpleNamespace) -> None:
    matched = match(batch.boxes, batch.labels, batch.default)
    logits, codes = torch.zeros(4, len(batch.default), C), torch.zeros(4, len(batch.default), 4)
    logits[..., 0] = 20
    for image, place in (matched >= 0).nonzero().tolist():
        truth = matched[image, place]
        logits[image, place, 0], logits[image, place, batch.labels[image, truth]] = 0, 20
        codes[image, place] = encode(batch.boxes[image, truth], batch.default[place])

    def rounded(kinds: torch.Tensor, boxes: torch.Tensor) -> list[list[float]]:
        return sorted(torch.cat([kinds[:, None], boxes.clamp(0, 64).round()], 1).tolist())

    found = detect(logits, codes, batch.default, 64, least_score=0.5)
    for one, truths, kinds in zip(found, batch.truths, batch.kinds, strict=True):
        assert rounded(one.labels, one.boxes) == rounded(kinds, truths)


def test_detections_are_limited_suppressed_and_sorted(batch: SimpleNamespace) -> None:
    found = detect(batch.logits, batch.codes, batch.default, 64, most=20, overlap=0.45)
    for image in found:
        assert len(image.scores) == 20
        assert (image.scores[:-1] >= image.scores[1:]).all()
        assert image.boxes.min() >= 0
        assert image.boxes.max() <= 64
        same = (image.labels[:, None] == image.labels) & ~torch.eye(20, dtype=torch.bool)
        assert box_iou(image.boxes, image.boxes)[same].max() <= 0.45
