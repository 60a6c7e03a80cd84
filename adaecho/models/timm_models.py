"""Build timm image classifiers by name, such as ResNet-50 (R. Wightman, "PyTorch Image Models")."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import load_state_dict
from torch import nn

from adaecho.errors import ConfigError, DataError, warn


def timm_model(name: str, num_classes: int, image_size: int, pretrained: str | None = None) -> nn.Module:
    """Build a timm model: float [N, 3, image_size, image_size] to logits [N, num_classes].

    Args:
        pretrained: a file for ``read_weights``; None for random weights. If the file has a different number
            of classes, the last layer is initialized randomly, with a warning.

    Raises:
        ConfigError: timm has no such model, or the model does not accept images of that size.
        DataError: the weights cannot be read, or belong to another model.
    """
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=5, cutoff=0.5)
        hint = f"; similar names: {', '.join(near)}" if near else ""
        raise ConfigError(f"task.model={name}: timm has no such model{hint}")
    weights = None if pretrained is None else read_weights(pretrained)
    arguments = {"num_classes": num_classes, **_size_argument(name, image_size)}
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
        # Try one image now, so that a wrong size is reported before any data is read.
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"task.image_size={image_size}: task.model={name} does not accept this size "
            f"({str(error).partition(chr(10))[0]}); choose another size or model"
        ) from error
    if weights is not None:
        _initialize_last_layer(weights, model, num_classes, f"task.pretrained={pretrained}")
        # Load the weights as timm loads downloaded ones, so that position embeddings are resized to the image
        # size.
        overlay = {"state_dict": weights, "num_classes": num_classes, "label_offset": 0, "source": ""}
        try:
            model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
        except (KeyError, RuntimeError, ValueError) as error:
            raise DataError(
                f"task.pretrained={pretrained}: contains weights of a model other than task.model={name} "
                f"({' '.join(str(error).split())[:200]})"
            ) from error
    return model.train()


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Read weights from a safetensors or ``torch.save`` file without executing code in it.

    The file contains a state dict, a checkpoint with a state dict in it, or timm's weights. A run's
    ``model/*.safetensors`` file also works.

    Raises:
        DataError: there is no such file, or it contains no weights.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(
            f"task.pretrained={path}: there is no such file; set an existing file, or null for random weights"
        )
    try:
        weights = load_state_dict(str(file), weights_only=True)
    except Exception as error:
        raise DataError(
            f"task.pretrained={path}: contains no weights that can be read without executing code "
            f"({str(error).partition(chr(10))[0]}); save the model's state_dict() as safetensors"
        ) from error
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise DataError(f"task.pretrained={path}: contains no state dict of names and tensors")
    if all(name.startswith(_RUN_PREFIX) for name in weights):
        weights = {name.removeprefix(_RUN_PREFIX): value for name, value in weights.items()}
    return weights


_RUN_PREFIX = "1."  # task imagenet's model is nn.Sequential(Normalize, timm's model)


def _initialize_last_layer(
    weights: dict[str, torch.Tensor], model: nn.Module, num_classes: int, key: str
) -> None:
    """Use the model's random last layer if the weights have none or one for different classes."""
    named = model.pretrained_cfg["classifier"]  # type: ignore[index]
    heads = [named] if isinstance(named, str) else list(named)
    fresh = {name: value for name, value in model.state_dict().items() if name.rpartition(".")[0] in heads}
    if all(name in weights and weights[name].shape == value.shape for name, value in fresh.items()):
        return
    classes = [len(weights[name]) for name in fresh if name in weights]
    has = f"{classes[0]:,} classes" if classes else "no last layer"
    weights.update(fresh)
    warn(f"{key}: has {has}, but the data has {num_classes:,}; {', '.join(heads)} is initialized")


def _size_argument(name: str, image_size: int) -> dict[str, Any]:
    """Return the argument that a model with a fixed image size needs, for example a vision transformer."""
    known = timm.get_pretrained_cfg(name)
    fixed = known is not None and known.fixed_input_size and known.input_size[-1] != image_size
    return {"img_size": image_size} if fixed else {}
