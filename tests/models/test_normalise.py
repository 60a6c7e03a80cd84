"""Pixels to floats, by hand."""

import pytest
import torch

from adaecho.models.normalise import Normalise


@pytest.mark.parametrize("channels_last", [False, True])
def test_each_channel_has_its_own_mean_and_std(channels_last: bool) -> None:
    pixels = torch.tensor([[[[0, 100], [50, 200]]]], dtype=torch.uint8)  # [1, 1, 2, 2]
    planes = Normalise([50.0, 100.0], [25.0, 10.0], channels_last=channels_last)(pixels)
    torch.testing.assert_close(planes, torch.tensor([[[[-2.0, 0.0]], [[0.0, 10.0]]]]))


def test_the_memory_format_is_the_one_asked_for() -> None:
    pixels = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    for channels_last in (False, True):
        planes = Normalise([0.0] * 3, [1.0] * 3, channels_last=channels_last)(pixels)
        assert planes.is_contiguous(memory_format=torch.channels_last) == channels_last
        assert planes.is_contiguous() == (not channels_last)


def test_a_checkpoint_holds_no_constants() -> None:
    assert not Normalise([0.0], [1.0], channels_last=False).state_dict()
