"""The first layer of an image model: uint8 pixels become floats on the device, a quarter of the transfer."""

from collections.abc import Sequence

import torch
from torch import nn

# Of each colour over ImageNet's training images, in pixel values.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)


class Normalise(nn.Module):
    """``(images - mean) / std`` per channel: uint8 [N, H, W, C] to float32 [N, C, H, W].

    Args:
        mean: of each channel, in pixel values.
        std: of each channel, in pixel values, positive.
        channels_last: memory format of the result. It is the pixels' own order, so it saves a copy.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        planes = ((images - self.mean) / self.std).permute(0, 3, 1, 2)
        return planes if self.channels_last else planes.contiguous()
