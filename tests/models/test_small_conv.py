"""The small net by hand."""

import torch
from torch.nn import functional

from adaecho.models.small_conv import small_conv


def test_it_is_two_normalised_convolutions_pooled_and_mapped() -> None:
    torch.manual_seed(0)
    model = small_conv(5).eval()  # running statistics 0 and 1: batch norm only divides by sqrt(1 + 1e-5)
    x = torch.randn(3, 1, 8, 8)
    y = x
    for weight in (model[0].weight, model[3].weight):
        y = (functional.conv2d(y, weight, padding=1) / (1 + 1e-5) ** 0.5).clamp(min=0)
    blocks = y.reshape(3, 32, 4, 2, 4, 2).amax((3, 5))
    expected = blocks.reshape(3, -1) @ model[-1].weight.T + model[-1].bias
    torch.testing.assert_close(model(x), expected)
