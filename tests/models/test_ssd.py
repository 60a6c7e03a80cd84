"""The SSDs: default boxes by number, and planes that fit them."""

import pytest
import torch
from torch import nn

from adaecho.models.ssd import small_ssd, ssd_resnet34


def test_ssd300_has_the_papers_8732_default_boxes() -> None:
    model = ssd_resnet34(num_classes=81)
    assert model.boxes.shape == (8732, 4)
    assert model.boxes.dtype == torch.float32
    # The first location of the finest plane: 38 x 38 steps of 8 pixels, the smallest box 0.07 of 300.
    torch.testing.assert_close(model.boxes[0], torch.tensor([4 - 10.5, 4 - 10.5, 4 + 10.5, 4 + 10.5]))


@pytest.mark.parametrize(("size", "boxes"), [(64, 390), (192, 3458)])
def test_other_sizes_have_fewer_boxes_and_a_prediction_for_each(size: int, boxes: int) -> None:
    model = ssd_resnet34(num_classes=4, image_size=size).eval()
    with torch.inference_mode():
        logits, codes = model(torch.zeros(2, 3, size, size))
    assert model.boxes.shape == (boxes, 4)
    assert (logits.shape, codes.shape) == ((2, boxes, 4), (2, boxes, 4))


def test_the_small_one_predicts_all_its_boxes_and_every_parameter_learns() -> None:
    model = small_ssd(num_classes=11)
    # Making the boxes leaves it in training mode, its statistics as they were.
    assert all(module.training for module in model.modules())
    assert all(not m.running_mean.any() for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    logits, codes = model(torch.randn(2, 3, 64, 64))
    assert logits.shape == (2, len(model.boxes), 11)
    (logits.square().mean() + codes.square().mean()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("size", [64, 96, 128, 160, 300])
def test_no_convolution_strides_over_a_plane_of_one_pixel(size: int) -> None:
    """Its gradient in bfloat16 is uninitialized memory on CPUs (torch 2.15)."""
    model = ssd_resnet34(num_classes=3, image_size=size).eval()
    strided = []

    def seen(module: nn.Conv2d, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if inputs[0].shape[-1] == 1 and module.stride != (1, 1):
            strided.append(module)
        assert output.shape[-1] >= 1

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(seen)
    with torch.inference_mode():
        model(torch.zeros(1, 3, size, size))
    assert strided == []
