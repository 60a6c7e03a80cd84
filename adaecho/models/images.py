"""Models for small images, and the layer that normalizes the input of every image model."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

# Mean and standard deviation of each color over ImageNet's training images, in pixel values.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)


class Normalize(nn.Module):
    """Normalize each channel, ``(images - mean) / std``: uint8 [N, H, W, C] to float32 [N, C, H, W].

    Args:
        mean, std: mean and standard deviation of each channel, in pixel values.
        channels_last: whether the result has torch's channels-last memory format, which saves a copy.
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


def small_mlp(num_classes: int) -> nn.Module:
    """Build an MLP with one hidden layer of 64 units: float [N, 1, 8, 8] to logits [N, num_classes]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))


def small_conv(num_classes: int) -> nn.Module:
    """Build a small convolutional net: float [N, 1, 8, 8] to logits [N, num_classes].

    It has two 3x3 convolutions with batch norm, max pooling and a linear layer.
    """
    layers = [*_conv_norm_relu(1, 16), *_conv_norm_relu(16, 32)]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, num_classes))


def cifar_resnet(depth: int = 32, num_classes: int = 10, channels: int = 16) -> nn.Module:
    """Build the ResNet for CIFAR: float [N, 3, 32, 32] to logits [N, num_classes].

    Source: He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2. Shortcuts have no
    parameters (option A of the paper).

    Args:
        depth: number of layers with weights, 6n + 2 with n >= 1: 8, 14, 20, 26, 32, ...
        num_classes: number of logits.
        channels: number of filters in the first of three stages. Each later stage has twice as many.

    Raises:
        ValueError: the depth is not 6n + 2.
    """
    blocks_per_stage, rest = divmod(depth - 2, 6)
    if rest or blocks_per_stage < 1:
        raise ValueError(f"depth={depth}: must be 6n + 2")
    layers = _conv_norm_relu(3, channels)
    in_channels = channels
    for out_channels in (channels, 2 * channels, 4 * channels):
        for _ in range(blocks_per_stage):
            layers.append(BasicBlock(in_channels, out_channels))
            in_channels = out_channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes)]
    model = nn.Sequential(*layers)
    model.apply(_initialize)
    return model


class BasicBlock(nn.Module):
    """A residual block: ``relu(shortcut(x) + bn(conv(relu(bn(conv(x))))))``.

    It maps float [N, in_channels, H, W] to [N, channels, H, W], and halves H and W if it adds channels.
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.stride = 1 if in_channels == channels else 2
        self.new_channels = channels - in_channels
        self.conv1 = _conv3x3(in_channels, channels, self.stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return functional.relu(y + self._shortcut(x), inplace=True)

    def _shortcut(self, x: torch.Tensor) -> torch.Tensor:
        """Option A, without parameters: keep every second pixel, and fill the new channels with zeros."""
        if self.stride == 1:
            return x
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


def _conv3x3(in_channels: int, channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)


def _conv_norm_relu(in_channels: int, channels: int) -> list[nn.Module]:
    return [_conv3x3(in_channels, channels), nn.BatchNorm2d(channels), nn.ReLU()]


def _initialize(module: nn.Module) -> None:
    """Draw weights from a normal distribution of variance 2 / fan_in, and set biases to zero.

    Source: He et al., "Delving Deep into Rectifiers", equation 10.
    """
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
