"""The small nets and the first layer, computed by hand."""

import pytest
import torch
from torch.nn import functional

from adaecho.models.images import Normalize, small_conv


def test_small_conv_is_two_normalized_convolutions_pooling_and_a_linear_layer() -> None:
    torch.manual_seed(0)
    model = small_conv(5).eval()  # running statistics 0 and 1: batch norm only divides by sqrt(1 + 1e-5)
    x = torch.randn(3, 1, 8, 8)
    y = x
    for weight in (model[0].weight, model[3].weight):
        y = (functional.conv2d(y, weight, padding=1) / (1 + 1e-5) ** 0.5).clamp(min=0)
    blocks = y.reshape(3, 32, 4, 2, 4, 2).amax((3, 5))
    expected = blocks.reshape(3, -1) @ model[-1].weight.T + model[-1].bias
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("channels_last", [False, True])
def test_pixels_become_normalized_floats_in_the_chosen_memory_format(channels_last: bool) -> None:
    pixels = torch.tensor([[[[0, 100], [50, 200]]] * 2], dtype=torch.uint8)  # [1, 2, 2, 2]
    normalize = Normalize([50.0, 100.0], [25.0, 10.0], channels_last=channels_last)
    planes = normalize(pixels)
    torch.testing.assert_close(planes, torch.tensor([[[[-2.0, 0.0]] * 2, [[0.0, 10.0]] * 2]]))
    assert planes.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert planes.is_contiguous() == (not channels_last)
    assert not normalize.state_dict(), "a checkpoint holds no constants"
