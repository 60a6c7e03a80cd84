"""A small convolutional net with batch norm, for images of about 8x8."""

from torch import nn


def small_conv(num_classes: int) -> nn.Module:
    """Two 3x3 convolutions, the second with stride 2, and a linear layer over what is left of the plane.

    float [N, 1, 8, 8] to logits [N, num_classes]; PyTorch's default initialisation.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, num_classes),
    )
