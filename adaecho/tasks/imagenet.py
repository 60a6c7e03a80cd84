"""The task imagenet: classify ImageNet's images with ResNet-50 (paper, Table 1).

The task also works with other labeled images and with any classifier from the library timm. As in the paper,
images are randomly resized, cropped, flipped and distorted in color.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets.labeled_images import LabeledImages, find_both
from adaecho.datasets.split import Subset, refuse_number, split_indices
from adaecho.errors import DataError
from adaecho.models.images import IMAGENET_MEAN, IMAGENET_STD, Normalize
from adaecho.models.timm_models import timm_model
from adaecho.ranks import DistributedContext
from adaecho.shards import TarShards
from adaecho.tasks.base import Split, Task, digest_of_classes
from adaecho.tasks.images import DecodeLabeled, EvaluationBatches, Prediction, classifier
from adaecho.tasks.options import ImagenetOptions as Options
from adaecho.transforms.photographs import CenterCrop, RandomResizedCrop
from adaecho.transforms.small_images import PadCropFlip


def build(config: Config, options: Options) -> Task:
    """Build the task. Images are read from storage when they are needed."""
    options.check_batches(config)
    path = config.data.path
    if path is None:
        raise DataError("data.path: imagenet needs a folder, tar shards or a Hub ID (ILSVRC/imagenet-1k)")
    train, validation = find_both(path, options.validation_path)
    num_classes = options.num_classes or len(train.classes)
    if not num_classes:
        raise DataError(f"task.num_classes=null: {path} does not name its classes; set the number")
    if num_classes < len(train.classes):
        raise DataError(f"task.num_classes={num_classes}: {path} has {len(train.classes)} classes; use null")
    source, held_out = _split(config, train, validation)
    augment = RandomResizedCrop(
        options.image_size,
        scale=(options.min_crop_area, 1.0),
        brightness=options.color_jitter,
        contrast=options.color_jitter,
        saturation=options.color_jitter,
        antialias=options.antialias,
    )
    crop = CenterCrop(options.image_size, antialias=options.antialias)
    decode = DecodeLabeled(num_classes)
    decode_to_crop = decode.for_augment(crop)
    batches = EvaluationBatches(held_out, lambda example: crop(decode_to_crop(example)), config)

    def build_model() -> nn.Module:
        model = timm_model(options.model, num_classes, options.image_size, options.pretrained)
        normalize = Normalize(IMAGENET_MEAN, IMAGENET_STD, channels_last=config.channels_last)
        return nn.Sequential(normalize, options.with_ghosts(model))

    def predictions(
        model: nn.Module, _: Split, device: torch.device, ranks: DistributedContext
    ) -> Iterator[Prediction]:
        streamed = isinstance(held_out, _FirstOfShards)
        chosen = held_out.share(ranks) if streamed else ranks.share(len(held_out))
        for _row, examples in batches.read(chosen):
            images = [example["image"] for example in examples]
            labels = torch.tensor([int(example["label"]) for example in examples], device=device)
            yield images, labels, model(torch.from_numpy(np.stack(images)).to(device)).float()

    sources = {"training_images": source, "validation_images": held_out}
    facts = {name: len(one) for name, one in sources.items() if hasattr(one, "__len__")}
    files = [*train.files, *(() if validation is None else validation.files)]
    return classifier(
        predictions,
        label_smoothing=options.label_smoothing,
        names=train.classes,
        name="imagenet",
        source=source,
        decode=decode,
        augment=augment,
        augment_parts=(replace(augment, flip=False), PadCropFlip(padding=0, flip=True)),
        build_model=build_model,
        files=[*files, *([] if options.pretrained is None else [options.pretrained])],
        facts={**facts, "classes": num_classes, **digest_of_classes(train.classes)},
    )


def _split(config: Config, train: LabeledImages, validation: LabeledImages | None) -> tuple[Any, Any]:
    """Return the training images and at most ``evaluate.max_examples`` validation images."""
    path, most = str(config.data.path), config.evaluate.max_examples
    number, seed = config.data.validation_examples, config.data.split_seed
    if isinstance(train.source, TarShards):
        train.source.seed = config.seed
        if validation is None:
            raise DataError(
                f"data.path={path}: no split can be held out from streamed shards; name the validation "
                "shards with task.validation_path="
            )
    if validation is None:
        rows, others = split_indices(len(train.source), number, seed=seed)
        return Subset(train.source, np.sort(rows)), Subset(train.source, others[:most])
    refuse_number(number, path)
    if isinstance(validation.source, TarShards):
        # Shards are written in random order, so the first images are a random sample.
        return train.source, _FirstOfShards(validation.source.urls, most)
    if most is None or most >= len(validation.source):
        return train.source, validation.source
    # Select images at random, because folders and tables are often sorted by class.
    rows = split_indices(len(validation.source), most, seed=seed)[1]
    return train.source, Subset(validation.source, np.sort(rows))


class _FirstOfShards:
    """The first examples of tar shards in stored order. Each evaluation reads them again."""

    def __init__(self, urls: list[str], most: int | None) -> None:
        self._shards, self._most = TarShards(urls, shuffle=False), most

    def share(self, ranks: DistributedContext) -> Iterator[dict[str, Any]]:
        """Return the examples that this rank must evaluate."""
        if self._most is not None:
            # Every rank reads the same examples and keeps only its own part.
            return islice(self._shards, ranks.rank, self._most, ranks.world_size)
        self._shards.set_share(ranks.rank, ranks.world_size)
        return iter(self._shards)

    # Shards have no row numbers, so each example is its own row.
    def __getitem__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def origin(self, row: dict[str, Any]) -> str:
        return str(row["__key__"])
