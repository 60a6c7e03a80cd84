"""The SSDs: default boxes by number, and planes that fit them."""

import pytest
import torch
from torch import nn

from adaecho.models.ghost_batch_norm import use_ghost_batch_norm
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
    logits, codes = model(torch.randn(2, 3, 64, 64))
    assert logits.shape == (2, len(model.boxes), 11)
    (logits.square().mean() + codes.square().mean()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_making_the_boxes_leaves_a_new_model_in_training_mode_with_clean_statistics() -> None:
    model = small_ssd(num_classes=3)
    assert all(module.training for module in model.modules())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean.abs().sum() == 0


def test_its_batch_norm_can_be_ghostly() -> None:
    model = use_ghost_batch_norm(small_ssd(num_classes=3), 2)
    model(torch.randn(4, 3, 64, 64))
    with pytest.raises(ValueError, match="slices of 2"):
        model(torch.randn(3, 3, 64, 64))
