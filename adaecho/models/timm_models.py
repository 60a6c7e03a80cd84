"""Image classifiers of timm by name, such as ResNet-50 (R. Wightman, "PyTorch Image Models")."""

from difflib import get_close_matches
from typing import Any

import timm
import torch
from torch import nn

from adaecho.errors import ConfigError


def timm_model(name: str, num_classes: int, image_size: int) -> nn.Module:
    """A freshly initialised model of timm; "resnet50" has 25,557,032 parameters for 1,000 classes.

    float [N, 3, image_size, image_size] to logits [N, num_classes].

    Raises:
        ConfigError: timm has no model of that name, or it takes no images of that size.
    """
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=5, cutoff=0.5)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise ConfigError(f"task.model={name}: timm has no such model{hint}")
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=False, num_classes=num_classes, **_of_size(name, image_size)
        )
        # One image, so that what doesn't fit is found before anything is read.
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"task.image_size={image_size}: task.model={name} takes no such images "
            f"({str(error).partition(chr(10))[0]}); choose another size or model"
        ) from error
    return model.train()


def _of_size(name: str, image_size: int) -> dict[str, Any]:
    """What makes a model for images of one size alone, a vision transformer say, be one for these."""
    known = timm.get_pretrained_cfg(name)
    fixed = known is not None and known.fixed_input_size and known.input_size[-1] != image_size
    return {"img_size": image_size} if fixed else {}
