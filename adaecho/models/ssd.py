"""SSD, the single shot detector: the model, its training target and loss, and its detections.

Source: W. Liu et al., "SSD: Single Shot MultiBox Detector", 2016. The ResNet-34 version follows MLPerf.

Boxes are x1, y1, x2, y2 in pixels. The model predicts boxes relative to fixed default boxes. Shapes use these
letters:

* N is the number of images.
* M is the largest number of true boxes in an image; rows with label 0 are padding.
* A is the number of default boxes.
* C is the number of classes including the background, which is class 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torchvision.models import resnet34
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSDHead
from torchvision.ops import batched_nms, box_iou

Features = list[torch.Tensor]

# Scale factors of the encoded centers and log sizes. The paper's code divides by "variances" of 0.1 and 0.2.
_CENTER, _SIZE = 10.0, 5.0
_LEAST_OVERLAP = 0.5  # a default box matches a true box if their IoU is at least this
_NEGATIVES_PER_POSITIVE = 3
_CANDIDATES = 400  # number of boxes of each class that enter non-maximum suppression
_LONGEST_LOG = 4.135  # log(1000 / 16) limits log sizes as in torchvision, so that predicted boxes stay finite


class SSD(nn.Module):
    """The detector: a backbone, a head, and default boxes.

    Args:
        backbone: maps images to the feature maps that predict boxes, finest first.
        out_channels: number of channels of each feature map.
        default_boxes: generator of the default boxes on each feature map.
        num_classes: number of classes including the background.

    Attributes:
        boxes: the default boxes, float32 [A, 4] as x1, y1, x2, y2 in pixels.
    """

    boxes: torch.Tensor

    def __init__(
        self,
        backbone: nn.Module,
        out_channels: Sequence[int],
        default_boxes: DefaultBoxGenerator,
        *,
        num_classes: int,
        image_size: int,
    ) -> None:
        super().__init__()
        self.backbone, self.image_size = backbone, image_size
        self.head = SSDHead(list(out_channels), default_boxes.num_anchors_per_location(), num_classes)
        self.register_buffer("boxes", self._make_boxes(default_boxes), persistent=False)

    @torch.no_grad()
    def _make_boxes(self, default_boxes: DefaultBoxGenerator) -> torch.Tensor:
        image = torch.zeros(1, 3, self.image_size, self.image_size)
        training = self.backbone.training
        planes = self.backbone.eval()(image)
        self.backbone.train(training)
        images = ImageList(image, [(self.image_size, self.image_size)])
        boxes: torch.Tensor = default_boxes(images, planes)[0]
        return boxes

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map images, float [N, 3, S, S], to class logits [N, A, num_classes] and box codes [N, A, 4]."""
        predicted: dict[str, Any] = self.head(self.backbone(images))
        return predicted["cls_logits"], predicted["bbox_regression"]


class FeatureMaps(nn.Module):
    """Runs stages one after another, and returns the list of their outputs as feature maps."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor) -> Features:
        planes = []
        for stage in self.stages:
            x = stage(x)
            planes.append(x)
        return planes


# The channels of MLPerf's feature maps. At 300 pixels, they have sides of 38, 19, 10, 5, 3 and 1, and there
# are 8,732 default boxes.
_CHANNELS = (256, 512, 512, 256, 256, 256)
_RATIOS = [[2], [2, 3], [2, 3], [2, 3], [2], [2]]
_SCALES = [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05]
_STEPS_PIXELS = [8, 16, 32, 64, 100, 300]


def ssd_resnet34(num_classes: int, image_size: int = 300) -> SSD:
    """Build an SSD with a ResNet-34 backbone and random initial weights.

    Args:
        num_classes: number of classes including the background.
        image_size: side of an image in pixels, at least 64; 300 in the paper. At other sizes, the last
            convolutions are padded, so that small feature maps do not vanish.
    """
    net = resnet34(weights=None)
    third = net.layer3
    third[0].conv1.stride = third[0].downsample[0].stride = (1, 1)
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, third)
    # At 300 pixels, the last two of the five pairs of convolutions have no padding. They reduce feature maps
    # of side 5 and 3 to 3 and 1.
    padded = image_size != 300
    side = -(-image_size // 8)  # side of the stem's feature map
    extra = []
    for i, middle in enumerate((256, 256, 128, 128, 128)):
        halves = i < 3 or padded
        # A feature map of one pixel has the same size after stride 1 and stride 2. Use 1, because at stride 2
        # in bfloat16 on CPUs, the gradient of the weights is uninitialized memory (torch 2.15, oneDNN).
        stride = 2 if halves and side > 1 else 1
        extra.append(_shrink(_CHANNELS[i], middle, _CHANNELS[i + 1], stride=stride, padding=int(halves)))
        side = -(-side // 2) if halves else side - 2
    steps = _STEPS_PIXELS if image_size == 300 else None
    boxes = DefaultBoxGenerator(_RATIOS, scales=_SCALES, steps=steps)
    for layer in extra:
        layer.apply(_initialize)
    return SSD(FeatureMaps([stem, *extra]), _CHANNELS, boxes, num_classes=num_classes, image_size=image_size)


def small_ssd(num_classes: int, image_size: int = 64) -> SSD:
    """Build a small SSD with feature maps at 1/4, 1/8 and 1/16 of the image's side.

    Args:
        num_classes: number of classes including the background.
        image_size: side of an image in pixels, a multiple of 16.
    """
    channels = (64, 64, 64)
    stem = nn.Sequential(_conv(3, 32, stride=2), _conv(32, 64, stride=2), _conv(64, 64))
    planes = FeatureMaps([stem, _shrink(64, 32, 64), _shrink(64, 32, 64)])
    planes.apply(_initialize)
    boxes = DefaultBoxGenerator([[], [], []], scales=[0.15, 0.25, 0.42, 0.7])
    return SSD(planes, channels, boxes, num_classes=num_classes, image_size=image_size)


def _conv(
    in_channels: int, channels: int, *, kernel: int = 3, stride: int = 1, padding: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


def _shrink(
    in_channels: int, middle: int, channels: int, *, stride: int = 2, padding: int = 1
) -> nn.Sequential:
    """Return a 1x1 convolution to fewer channels, followed by a 3x3 convolution to a smaller feature map."""
    return nn.Sequential(
        _conv(in_channels, middle, kernel=1, padding=0),
        _conv(middle, channels, stride=stride, padding=padding),
    )


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def encode(boxes: torch.Tensor, default_boxes: torch.Tensor) -> torch.Tensor:
    """Encode boxes [..., A, 4] relative to default boxes [A, 4], as scaled center offsets and log sizes."""
    center, size = _center_and_size(boxes)
    default_center, default_size = _center_and_size(default_boxes)
    offset = _CENTER * (center - default_center) / default_size
    return torch.cat([offset, _SIZE * torch.log(size / default_size)], dim=-1)


def decode(codes: torch.Tensor, default_boxes: torch.Tensor) -> torch.Tensor:
    """Decode codes to boxes; this is the inverse of ``encode``."""
    default_center, default_size = _center_and_size(default_boxes)
    center = codes[..., :2] / _CENTER * default_size + default_center
    size = torch.exp((codes[..., 2:] / _SIZE).clamp(max=_LONGEST_LOG)) * default_size
    return torch.cat([center - size / 2, center + size / 2], dim=-1)


def _center_and_size(boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = boxes[..., :2], boxes[..., 2:]
    return (low + high) / 2, high - low


def match(boxes: torch.Tensor, labels: torch.Tensor, default_boxes: torch.Tensor) -> torch.Tensor:
    """Return which true box each default box should predict: int64 [N, A], where -1 is the background.

    Each default box is matched to the true box with the largest IoU if that IoU is at least 0.5. Each true
    box is also matched to the default box with the largest IoU.

    Args:
        boxes: true boxes, float [N, M, 4].
        labels: int64 [N, M], 0 for padding.
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
    favorite = overlap.argmax(dim=2)
    # Add one default box, which the padding can claim.
    wanted = labels.new_full((number, num_default + 1), -1)
    favorite = favorite.masked_fill(~real, num_default)
    rows = torch.arange(most, device=labels.device).expand(number, most)
    wanted = wanted.scatter_reduce(1, favorite, rows, "amax")[:, :num_default]
    return torch.where(wanted >= 0, wanted, matched)


def multibox_loss(
    logits: torch.Tensor,
    codes: torch.Tensor,
    boxes: torch.Tensor,
    labels: torch.Tensor,
    default_boxes: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of a batch, and the number of matched default boxes to divide it by.

    The loss is equation 1 of the paper: smooth L1 loss of box offsets plus cross entropy of classes. The
    cross entropy covers the matched boxes and, per image, up to three times as many background boxes with the
    highest loss.

    Args:
        logits: float [N, A, C].
        codes: float [N, A, 4].
        boxes: true boxes, float [N, M, 4], each with positive width and height.
        labels: int64 [N, M], 0 for padding.
        default_boxes: float [A, 4].
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
    """The detections in one image, best first.

    Attributes:
        boxes: float [K, 4], in pixels of the network's input, clipped to the input.
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
    """Return the boxes of each image after non-maximum suppression in each class (section 3.1 of the paper).

    Args:
        logits, codes, default_boxes: as in ``multibox_loss``.
        image_size: side of the network's input, in pixels.
        least_score: boxes need a higher probability than this.
        overlap: if two boxes of a class have a higher IoU than this, the box with the lower score is dropped.
        most: maximum number of detections per image.
    """
    probabilities = functional.softmax(logits.float(), dim=-1)
    boxes = decode(codes.float(), default_boxes).clamp(0, image_size)
    found = []
    for of_image, boxes_of_image in zip(probabilities, boxes, strict=True):
        # Both are [classes without the background, candidates].
        scores, indices = of_image[:, 1:].t().topk(min(_CANDIDATES, len(boxes_of_image)), dim=1)
        class_index, rank = (scores > least_score).nonzero(as_tuple=True)
        candidates, scores = boxes_of_image[indices[class_index, rank]], scores[class_index, rank]
        kept = batched_nms(candidates, scores, class_index, overlap)[:most]
        found.append(Detections(candidates[kept], scores[kept], class_index[kept] + 1))
    return found
