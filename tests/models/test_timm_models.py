"""timm's models by name."""

import pytest
import torch

from adaecho.errors import ConfigError
from adaecho.models.ghost_batch_norm import GhostBatchNorm2d, use_ghost_batch_norm
from adaecho.models.timm_models import timm_model


def test_resnet50_has_its_published_number_of_parameters() -> None:
    # He et al. 2015; torchvision's table of models says the same.
    with torch.device("meta"):
        model = timm_model("resnet50", 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


def test_every_batch_norm_of_resnet50_becomes_a_ghost() -> None:
    with torch.device("meta"):
        model = use_ghost_batch_norm(timm_model("resnet50", 10), 32)
    assert sum(isinstance(module, GhostBatchNorm2d) for module in model.modules()) == 53


def test_an_unknown_name_is_refused_with_those_near_it() -> None:
    with pytest.raises(
        ConfigError, match=r"task\.model=resnet5: timm has no such model; near it are resnet50"
    ):
        timm_model("resnet5", 10)
