"""timm's models by name."""

import pytest
import torch

from adaecho.errors import ConfigError
from adaecho.models.ghost_batch_norm import GhostBatchNorm2d, use_ghost_batch_norm
from adaecho.models.timm_models import timm_model


def test_resnet50_has_its_published_number_of_parameters() -> None:
    # He et al. 2015; torchvision's table of models says the same.
    with torch.device("meta"):
        model = timm_model("resnet50", 1000, 224)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


def test_every_batch_norm_of_resnet50_becomes_a_ghost() -> None:
    with torch.device("meta"):
        model = use_ghost_batch_norm(timm_model("resnet50", 10, 64), 32)
    assert sum(isinstance(module, GhostBatchNorm2d) for module in model.modules()) == 53


def test_an_unknown_name_is_refused_with_those_near_it() -> None:
    with pytest.raises(
        ConfigError, match=r"task\.model=resnet-50: timm has no such model; near it are .*resnet50"
    ):
        timm_model("resnet-50", 10, 64)


def test_a_vision_transformer_is_made_for_the_size_of_the_images() -> None:
    model = timm_model("vit_tiny_patch16_224", 5, 32)
    assert model.training
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


def test_images_that_a_model_does_not_take_are_refused() -> None:
    message = r"task\.image_size=32: task\.model=inception_v3 takes no such images \(.*Kernel size can't be"
    with pytest.raises(ConfigError, match=message):
        timm_model("inception_v3", 5, 32)
