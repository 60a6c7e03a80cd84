"""A small fully connected net without batch norm, for images of 8x8."""

from torch import nn


def small_mlp(num_classes: int) -> nn.Module:
    """One hidden layer of 64 units.

    float [N, 1, 8, 8] to logits [N, num_classes]; PyTorch's default initialisation. Nothing in it mixes the
    examples of a batch: a batch's gradient is the mean of its parts' gradients, however it is cut.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))
