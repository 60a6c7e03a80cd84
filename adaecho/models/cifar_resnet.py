"""ResNets for CIFAR (He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2).

A 3x3 convolution, three stages of n blocks of two 3x3 convolutions (16, 32 and 64 filters on planes of
32, 16 and 8 pixels), global average pooling, a linear layer: 6n + 2 weighted layers.
"""

import torch
from torch import nn
from torch.nn import functional

from adaecho.config.validation import check_depth


def cifar_resnet(depth: int = 32, num_classes: int = 10, channels: int = 16) -> nn.Module:
    """The net with shortcuts of option A and He initialisation; 464,154 parameters at depth 32, 10 classes.

    float [N, 3, 32, 32] to logits [N, num_classes].

    Args:
        depth: weighted layers, 6n + 2 with n >= 1: 8, 14, 20, 26, 32, ...
        num_classes: logits of the last layer.
        channels: filters of the first stage, at least 1; others than 16 are none of the paper's nets.

    Raises:
        ConfigError: there is no net of that depth.
    """
    blocks_per_stage = check_depth(depth)
    layers: list[nn.Module] = [_conv3x3(3, channels), nn.BatchNorm2d(channels), nn.ReLU()]
    in_channels = channels
    for out_channels in (channels, 2 * channels, 4 * channels):
        for _ in range(blocks_per_stage):
            layers.append(BasicBlock(in_channels, out_channels))
            in_channels = out_channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes)]
    model = nn.Sequential(*layers)
    model.apply(_initialise)
    return model


class BasicBlock(nn.Module):
    """``relu(shortcut(x) + bn(conv(relu(bn(conv(x))))))``; more channels out than in halve the plane.

    float [N, in_channels, H, W] to [N, channels, H, W], or to [N, channels, H / 2, W / 2].
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
        """Option A: the identity on every second pixel, with zeros for the new channels; no parameters."""
        if self.stride == 1:
            return x
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


def _conv3x3(in_channels: int, channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)


def _initialise(module: nn.Module) -> None:
    """Normal with variance 2 / fan_in (He et al., "Delving Deep into Rectifiers", eq. 10); biases zero."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
