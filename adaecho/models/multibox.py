"""SSD's training target, loss and detections: whole batches of padded boxes, without a loop over images.

W. Liu et al., "SSD: Single Shot MultiBox Detector", 2016, section 2.2. Boxes are x1, y1, x2, y2 in pixels.
N images, M true boxes of the image with most (rows of label 0 are padding), A default boxes, C classes with
the background, which is class 0.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional
from torchvision.ops import batched_nms, box_iou

# Scale of the codes of centres and of log sizes: the paper's code divides by variances 0.1 and 0.2.
_CENTRE, _SIZE = 10.0, 5.0
_LEAST_OVERLAP = 0.5  # IoU from which a default box is to predict a true one
_NEGATIVES_PER_POSITIVE = 3
_CANDIDATES = 400  # of a class, before suppression
_LONGEST_LOG = 4.135  # log(1000 / 16), as in torchvision: predicted boxes stay finite


def encode(boxes: torch.Tensor, default_boxes: torch.Tensor) -> torch.Tensor:
    """Codes of boxes [..., A, 4] relative to default boxes [A, 4]: offset of the centre, log of the size."""
    centre, size = _centre_and_size(boxes)
    default_centre, default_size = _centre_and_size(default_boxes)
    offset = _CENTRE * (centre - default_centre) / default_size
    return torch.cat([offset, _SIZE * torch.log(size / default_size)], dim=-1)


def decode(codes: torch.Tensor, default_boxes: torch.Tensor) -> torch.Tensor:
    """The inverse of ``encode``."""
    default_centre, default_size = _centre_and_size(default_boxes)
    centre = codes[..., :2] / _CENTRE * default_size + default_centre
    size = torch.exp((codes[..., 2:] / _SIZE).clamp(max=_LONGEST_LOG)) * default_size
    return torch.cat([centre - size / 2, centre + size / 2], dim=-1)


def _centre_and_size(boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = boxes[..., :2], boxes[..., 2:]
    return (low + high) / 2, high - low


def match(boxes: torch.Tensor, labels: torch.Tensor, default_boxes: torch.Tensor) -> torch.Tensor:
    """Which true box each default box is to predict, int64 [N, A]; -1 is the background.

    A default box takes the true box that it overlaps most, if by 0.5 or more (IoU). Besides, each
    true box takes the default box that overlaps it most; of several that want the same one the last gets it.

    Args:
        boxes: float [N, M, 4].
        labels: int64 [N, M], 0 where a row is padding.
        default_boxes: float [A, 4].
    """
    number, most = labels.shape
    num_default = len(default_boxes)
    if not most:
        return labels.new_full((number, num_default), -1)
    real = labels > 0
    overlap = box_iou(boxes.reshape(-1, 4), default_boxes).view(number, most, num_default)
    overlap = overlap.masked_fill(~real[..., None], -1.0)
    best, matched = overlap.max(dim=1)
    matched = matched.masked_fill(best < _LEAST_OVERLAP, -1)
    favourite = overlap.argmax(dim=2)
    # One true box more than there are default boxes to receive what padding wants.
    wanted = labels.new_full((number, num_default + 1), -1)
    favourite = favourite.masked_fill(~real, num_default)
    rows = torch.arange(most, device=labels.device).expand(number, most)
    wanted = wanted.scatter_reduce(1, favourite, rows, "amax")[:, :num_default]
    return torch.where(wanted >= 0, wanted, matched)


def multibox_loss(
    logits: torch.Tensor,
    codes: torch.Tensor,
    boxes: torch.Tensor,
    labels: torch.Tensor,
    default_boxes: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses of a batch, and the number of positives to divide it by (paper, equation 1).

    Smooth L1 of the codes of matched default boxes, their cross entropy, and that of the background boxes
    that are classified worst, at most three for each positive of the same image.

    Args:
        logits: float [N, A, C].
        codes: float [N, A, 4].
        boxes: float [N, M, 4], each with positive width and height.
        labels: int64 [N, M], 0 where a row is padding.
        default_boxes: float [A, 4].

    Returns:
        Two scalars, the first with gradient. Both are 0 for images without boxes.
    """
    logits, codes = logits.float(), codes.float()
    with torch.no_grad():
        matched = match(boxes, labels, default_boxes)
        positive = matched >= 0
    image, default = positive.nonzero(as_tuple=True)
    truth = matched[image, default]
    wanted = encode(boxes[image, truth], default_boxes[default])
    box_loss = functional.smooth_l1_loss(codes[image, default], wanted, reduction="sum")
    classes = torch.zeros_like(matched)
    classes[image, default] = labels[image, truth]
    class_loss = functional.cross_entropy(logits.transpose(1, 2), classes, reduction="none")
    with torch.no_grad():
        hardness = class_loss.masked_fill(positive, -torch.inf)
        rank = hardness.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        positives = positive.sum(dim=1, keepdim=True)
        kept = positive | (rank < _NEGATIVES_PER_POSITIVE * positives) & ~positive
    return box_loss + class_loss[kept].sum(), positives.sum().float()


@dataclass(frozen=True)
class Detections:
    """The boxes found in one image, best first.

    Attributes:
        boxes: float [K, 4], in pixels of the network's input, within it.
        scores: float [K], probabilities.
        labels: int64 [K], from 1.
    """

    boxes: torch.Tensor
    scores: torch.Tensor
    labels: torch.Tensor


def detect(
    logits: torch.Tensor,
    codes: torch.Tensor,
    default_boxes: torch.Tensor,
    image_size: int,
    *,
    least_score: float = 0.01,
    overlap: float = 0.45,
    most: int = 200,
) -> list[Detections]:
    """Boxes of each image after non-maximum suppression within each class (paper, section 3.1).

    Args:
        logits, codes, default_boxes: as in ``multibox_loss``.
        image_size: side of the network's input, in pixels.
        least_score: probability that a box must exceed.
        overlap: IoU above which the weaker of two boxes of a class is dropped.
        most: detections of an image after it.
    """
    probabilities = functional.softmax(logits.float(), dim=-1)
    boxes = decode(codes.float(), default_boxes).clamp(0, image_size)
    found = []
    for of_image, boxes_of_image in zip(probabilities, boxes, strict=True):
        # [classes without the background, candidates] each
        scores, indices = of_image[:, 1:].t().topk(min(_CANDIDATES, len(boxes_of_image)), dim=1)
        class_index, rank = (scores > least_score).nonzero(as_tuple=True)
        candidates, scores = boxes_of_image[indices[class_index, rank]], scores[class_index, rank]
        kept = batched_nms(candidates, scores, class_index, overlap)[:most]
        found.append(Detections(candidates[kept], scores[kept], class_index[kept] + 1))
    return found
