"""A small convolutional net with batch norm, for images of 8x8."""

from torch import nn


def small_conv(num_classes: int) -> nn.Module:
    """Two 3x3 convolutions of 16 and 32 filters, 2x2 max pooling, a linear layer.

    float [N, 1, 8, 8] to logits [N, num_classes]; PyTorch's default initialisation.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, num_classes),
    )
