"""Image classifiers of timm by name, such as ResNet-50 (R. Wightman, "PyTorch Image Models")."""

import timm
from torch import nn

from adaecho.errors import ConfigError


def timm_model(name: str, num_classes: int) -> nn.Module:
    """A freshly initialised model of timm; "resnet50" has 25,557,032 parameters for 1,000 classes.

    float [N, 3, H, W] to logits [N, num_classes].

    Raises:
        ConfigError: timm has no model of that name.
    """
    if not timm.is_model(name):
        near = timm.list_models(f"{name.split('_')[0]}*")[:5]
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise ConfigError(f"task.model={name}: timm has no such model{hint}")
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes)
    return model
