"""SSD, the single shot detector, from torchvision's parts.

W. Liu et al., "SSD: Single Shot MultiBox Detector", 2016. The ResNet-34 form is MLPerf's: stages 1 to 3
without the stride of the third (a plane of 38 pixels at 300), then five pairs of convolutions to one pixel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchvision.models import resnet34
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSDHead

Features = list[torch.Tensor]


class SSD(nn.Module):
    """Backbone, head and default boxes.

    Args:
        backbone: float [N, 3, S, S] to the planes that boxes are predicted from, finest first.
        out_channels: of those planes.
        default_boxes: as many aspect ratio lists as there are planes.
        num_classes: with the background, which is class 0.
        image_size: S, in pixels.

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
        """float [N, 3, S, S] to class logits [N, A, num_classes] and box codes [N, A, 4]."""
        predicted: dict[str, Any] = self.head(self.backbone(images))
        return predicted["cls_logits"], predicted["bbox_regression"]


class Planes(nn.Module):
    """Stages run one after another; the result of each is a plane to predict from.

    float [N, 3, S, S] to a list of float [N, C_i, S_i, S_i].
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor) -> Features:
        planes = []
        for stage in self.stages:
            x = stage(x)
            planes.append(x)
        return planes


# MLPerf's: the planes at 300 pixels have sides of 38, 19, 10, 5, 3 and 1, and 8,732 default boxes in all.
_CHANNELS = (256, 512, 512, 256, 256, 256)
_RATIOS = [[2], [2, 3], [2, 3], [2, 3], [2], [2]]
_SCALES = [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05]
_STEPS_PIXELS = [8, 16, 32, 64, 100, 300]


def ssd_resnet34(num_classes: int, image_size: int = 300) -> SSD:
    """SSD with a ResNet-34 backbone, from scratch, batch norm in every layer but the head's.

    Args:
        num_classes: with the background, which is class 0.
        image_size: in pixels, 300 as in the paper (8,732 boxes) or another from 64 up. Default boxes keep
            their size relative to the image; at other sides than 300 the last convolutions are padded.
    """
    net = resnet34(weights=None)
    third = net.layer3
    third[0].conv1.stride = third[0].downsample[0].stride = (1, 1)
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, third)
    # The last two of five take planes of 5 and 3 pixels to 3 and 1 without padding.
    padded = image_size != 300
    side = -(-image_size // 8)  # of the stem's plane
    extra = []
    for i, middle in enumerate((256, 256, 128, 128, 128)):
        halves = i < 3 or padded
        # A plane of one pixel stays one at either stride. At two the gradient of the weights in bfloat16 is
        # memory that nobody has written, on CPUs (torch 2.15, oneDNN): up to millions, or NaN.
        stride = 2 if halves and side > 1 else 1
        extra.append(_shrink(_CHANNELS[i], middle, _CHANNELS[i + 1], stride=stride, padding=int(halves)))
        side = -(-side // 2) if halves else side - 2
    steps = _STEPS_PIXELS if image_size == 300 else None
    boxes = DefaultBoxGenerator(_RATIOS, scales=_SCALES, steps=steps)
    for layer in extra:
        layer.apply(_initialise)
    return SSD(Planes([stem, *extra]), _CHANNELS, boxes, num_classes=num_classes, image_size=image_size)


def small_ssd(num_classes: int, image_size: int = 64) -> SSD:
    """A small SSD for the scenes: 3x3 convolutions with batch norm, planes of 1/4, 1/8 and 1/16 of the image.

    Args:
        num_classes: with the background, which is class 0.
        image_size: in pixels, a multiple of 16.
    """
    channels = (64, 64, 64)
    stem = nn.Sequential(_conv(3, 32, stride=2), _conv(32, 64, stride=2), _conv(64, 64))
    planes = Planes([stem, _shrink(64, 32, 64), _shrink(64, 32, 64)])
    planes.apply(_initialise)
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
    """A 1x1 convolution to fewer channels, then a 3x3 one to a smaller plane."""
    return nn.Sequential(
        _conv(in_channels, middle, kernel=1, padding=0),
        _conv(middle, channels, stride=stride, padding=padding),
    )


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
