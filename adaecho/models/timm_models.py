"""Image classifiers of timm by name, such as ResNet-50 (R. Wightman, "PyTorch Image Models")."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import load_state_dict
from torch import nn

from adaecho.errors import ConfigError, DataError, warn


def timm_model(name: str, num_classes: int, image_size: int, pretrained: str | None = None) -> nn.Module:
    """A freshly initialised model of timm; "resnet50" has 25,557,032 parameters for 1,000 classes.

    float [N, 3, image_size, image_size] to logits [N, num_classes].

    Args:
        name: one of timm's.
        num_classes: of the logits.
        image_size: pixels.
        pretrained: a file of weights to begin with, see ``read_weights``. Where it has another number of
            classes the last layer is a new one, and a line on stderr says so.

    Raises:
        ConfigError: timm has no model of that name, or it takes no images of that size.
        DataError: the weights can't be read, or are another model's.
    """
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=5, cutoff=0.5)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise ConfigError(f"task.model={name}: timm has no such model{hint}")
    weights = None if pretrained is None else read_weights(pretrained)
    arguments = {"num_classes": num_classes, **_of_size(name, image_size)}
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
        # One image, so that what doesn't fit is found before anything is read.
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"task.image_size={image_size}: task.model={name} takes no such images "
            f"({str(error).partition(chr(10))[0]}); choose another size or model"
        ) from error
    if weights is not None:
        _renew_last_layer(weights, model, num_classes, f"task.pretrained={pretrained}")
        # As timm loads what it has downloaded: position embeddings are fitted to the size of the images.
        overlay = {"state_dict": weights, "num_classes": num_classes, "label_offset": 0, "source": ""}
        try:
            model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
        except (KeyError, RuntimeError, ValueError) as error:
            raise DataError(
                f"task.pretrained={pretrained}: holds another model's weights than task.model={name} "
                f"({' '.join(str(error).split())[:200]})"
            ) from error
    return model.train()


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """The weights in a file of safetensors, or of ``torch.save``; no code in it is executed.

    Such as timm's for the model, a state dict, a checkpoint that holds one, or the ``model/*.safetensors`` of
    a run of task imagenet.

    Raises:
        DataError: there is no such file, or it holds no weights.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"task.pretrained={path}: there is no such file; name one, or null to begin anew")
    try:
        weights = load_state_dict(str(file), weights_only=True)
    except Exception as error:
        raise DataError(
            f"task.pretrained={path}: holds no weights that can be read without executing code in it "
            f"({str(error).partition(chr(10))[0]}); save the model's state_dict() as safetensors"
        ) from error
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise DataError(f"task.pretrained={path}: holds no state dict, a name and a tensor for each weight")
    if all(name.startswith(_OF_A_RUN) for name in weights):
        weights = {name.removeprefix(_OF_A_RUN): value for name, value in weights.items()}
    return weights


_OF_A_RUN = "1."  # task imagenet's model is a sequence: normalise, and then timm's


def _renew_last_layer(weights: dict[str, torch.Tensor], model: nn.Module, num_classes: int, key: str) -> None:
    """Put the model's own last layer among the weights where theirs has other classes, or is absent."""
    configured: Any = model.pretrained_cfg
    named = configured["classifier"]
    heads = [named] if isinstance(named, str) else list(named)
    fresh = {name: value for name, value in model.state_dict().items() if name.rpartition(".")[0] in heads}
    if all(name in weights and weights[name].shape == value.shape for name, value in fresh.items()):
        return
    theirs = [len(weights[name]) for name in fresh if name in weights]
    has = f"{theirs[0]:,} classes" if theirs else "no last layer"
    weights.update(fresh)
    warn(f"{key}: has {has}, the data {num_classes:,}; {', '.join(heads)} begins anew")


def _of_size(name: str, image_size: int) -> dict[str, Any]:
    """What makes a model for images of one size alone, a vision transformer say, be one for these."""
    known = timm.get_pretrained_cfg(name)
    fixed = known is not None and known.fixed_input_size and known.input_size[-1] != image_size
    return {"img_size": image_size} if fixed else {}
