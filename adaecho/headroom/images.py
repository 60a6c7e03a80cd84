"""``python -m adaecho.headroom images=...``: photographs at ImageNet's augmentation, without a task.

images=PATH          a folder of images, or parquet with a column image
step_s=S             seconds of your own training step; without it ResNet-50 is timed
batch_size=64  num_workers=2  size=224  max_bad_examples=0  device=auto
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from adaecho.config.bounds import one_of
from adaecho.config.schema import DEVICES
from adaecho.datasets.labelled_images import find_images
from adaecho.datasets.storage import storage_errors
from adaecho.errors import ConfigError, DataError, with_notes
from adaecho.headroom.measure import Headroom, Upstream, report, sgd_step_s

_JITTER = 0.4


@dataclass(frozen=True)
class ImageArguments:
    """The command's arguments, ``name=value``."""

    images: str
    batch_size: int = 64
    num_workers: int = os.cpu_count() or 1
    size: int = 224
    max_bad_examples: int = 0
    device: str = "auto"


def parse(arguments: list[str]) -> ImageArguments:
    """Read the arguments.

    Raises:
        ConfigError: one is unknown or out of range.
    """
    known = {field.name: field.type for field in fields(ImageArguments)}
    values: dict[str, Any] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in known:
            raise ConfigError(f"{argument}: with images= there are only {', '.join([*known, 'step_s'])}")
        values[name] = value if known[name] is str else _whole(name, value)
    given = ImageArguments(**values)
    one_of("device", given.device, DEVICES)
    return given


def _whole(name: str, value: str) -> int:
    least = 1 if name in ("batch_size", "size") else 0
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"{name}={value}: must be a whole number, at least {least}")
    return int(value)


@storage_errors()
def measure_images(arguments: list[str], budget_s: float, step_s: float | None) -> Iterator[str]:
    """Measure, and tell line by line.

    Raises:
        UserError: an argument can't be, or more images are damaged than ``max_bad_examples`` allows.
    """
    from adaecho.transforms.photographs import DecodeImage, RandomResizedCrop

    given = parse(arguments)
    augment = RandomResizedCrop(given.size, brightness=_JITTER, contrast=_JITTER, saturation=_JITTER)
    upstream = Upstream({
        "source": find_images(given.images), "decode": DecodeImage(), "augment": augment,
        "batch_size": given.batch_size, "num_workers": given.num_workers, "prefetch": 2,
        "max_bad_examples": given.max_bad_examples,
    })  # fmt: skip
    try:
        upstream_s, batch = upstream.batch_s(budget_s)
    except ValueError as error:  # an image that can't be decoded; the notes say which
        raise DataError(with_notes(error).replace("\n", "; ")) from error
    if step_s is None:
        step_s = _resnet50_step_s(batch["image"], given.device, budget_s)
    found = Headroom(upstream.stages_s(budget_s), upstream_s, step_s)
    return report(given.images, given.batch_size, given.num_workers, found)


def _resnet50_step_s(images: torch.Tensor, device: str, budget_s: float) -> float:
    """Seconds of one SGD step of ResNet-50 on a resident batch, in bfloat16 on a GPU."""
    from torchvision.models import resnet50

    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    where = torch.device("cuda" if cuda else "cpu")
    model = resnet50().to(where, memory_format=torch.channels_last)
    pixels = images.to(where).permute(0, 3, 1, 2).float() / 255
    labels = torch.zeros(len(images), dtype=torch.int64, device=where)

    def loss() -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(model(pixels), labels), 1

    return sgd_step_s(model, loss, "bfloat16" if cuda else "float32", budget_s)
