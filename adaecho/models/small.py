"""Small nets for images of 8x8: a fully connected one without batch norm, a convolutional one with it."""

from torch import nn


def small_mlp(num_classes: int) -> nn.Module:
    """One hidden layer of 64 units.

    float [N, 1, 8, 8] to logits [N, num_classes]; PyTorch's default initialisation. Nothing in it mixes the
    examples of a batch: a batch's gradient is the mean of its parts' gradients, however it is cut.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))


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
