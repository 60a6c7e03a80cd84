"""ImageNet classification with ResNet-50 (paper, Table 1), or any classifier of timm on any labelled images.

The paper resizes, crops and flips at random and distorts colours; how strongly it doesn't say.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets.labelled_images import find_both
from adaecho.datasets.split import Rows, hold_out_rows, refuse_number
from adaecho.errors import DataError
from adaecho.models.normalise import IMAGENET_MEAN, IMAGENET_STD, Normalise
from adaecho.models.timm_models import timm_model
from adaecho.ranks import DistributedContext
from adaecho.shards import TarShards
from adaecho.tasks.base import Split, Task, digest_of_classes
from adaecho.tasks.images import DecodeLabelled, Prediction, classifier, read_batches
from adaecho.tasks.options import ImagenetOptions as Options
from adaecho.transforms.photographs import CentreCrop, RandomResizedCrop
from adaecho.transforms.small_images import PadCropFlip


def build(config: Config, options: Options) -> Task:
    """The classification task; images are read from storage as they are needed.

    Raises:
        ConfigError: timm has no such model, or ``task.ghost_size`` doesn't divide the batch.
        DataError: ``data.path`` holds no labelled images, or it isn't known how many classes there are.
    """
    options.check_batches(config)
    path = config.data.path
    if path is None:
        raise DataError(
            "data.path: task imagenet needs a folder, tar shards or a hub id (ILSVRC/imagenet-1k: log in)"
        )
    train, validation = find_both(path, options.validation_path)
    names = train.classes or ()
    num_classes = options.num_classes or len(names)
    if not num_classes:
        raise DataError(f"task.num_classes=null: {path} doesn't say how many classes there are; set it")
    if num_classes < len(names):
        raise DataError(f"task.num_classes={num_classes}: {path} names {len(names)} classes; set it to these")
    if isinstance(train.source, TarShards) and validation is None:
        raise DataError(
            f"data.path={path}: shards are streamed, so none of them can be held out; name the validation "
            "shards with task.validation_path="
        )
    if validation is None:
        rows, others = hold_out_rows(
            len(train.source), config.data.validation_examples, seed=config.data.split_seed
        )
        source, files = Rows(train.source, np.sort(rows)), train.files
        held_out = Rows(train.source, others[: config.evaluate.max_examples])  # in a drawn order
    else:
        refuse_number(config.data.validation_examples, path)
        source, files = train.source, [*train.files, *validation.files]
        held_out = _drawn(validation.source, config)
    if isinstance(source, TarShards):
        source.seed = config.seed
    lengths = {"training_images": source, "validation_images": held_out}
    decode, crop = DecodeLabelled(num_classes), CentreCrop(options.image_size, antialias=options.antialias)
    decode_to_crop = decode.for_augment(crop)
    strength = options.colour_distortion
    augment = RandomResizedCrop(
        options.image_size,
        scale=(options.min_crop_area, 1.0),
        brightness=strength,
        contrast=strength,
        saturation=strength,
        antialias=options.antialias,
    )

    def build_model() -> nn.Module:
        model = timm_model(options.model, num_classes, options.image_size, options.pretrained)
        normalise = Normalise(IMAGENET_MEAN, IMAGENET_STD, channels_last=config.channels_last)
        return nn.Sequential(normalise, options.with_ghosts(model))

    def predictions(
        model: nn.Module,
        split: Split,  # noqa: ARG001
        device: torch.device,
        ranks: DistributedContext,
    ) -> Iterator[Prediction]:
        batches = read_batches(
            held_out,
            lambda example: crop(decode_to_crop(example)),
            held_out.share(ranks) if isinstance(held_out, _Streamed) else ranks.share(len(held_out)),
            batch_size=config.evaluate.batch_size,
            threads=max(config.data.num_workers, 1),
        )
        for _, examples in batches:
            images = [example["image"] for example in examples]
            labels = torch.tensor([int(example["label"]) for example in examples], device=device)
            yield images, labels, model(torch.from_numpy(np.stack(images)).to(device)).float()

    return classifier(
        predictions,
        label_smoothing=options.label_smoothing,
        names=names,
        name="imagenet",
        source=source,
        decode=decode,
        augment=augment,
        augment_parts=(replace(augment, flip=False), PadCropFlip(padding=0, flip=True)),
        build_model=build_model,
        files=[*files, *([] if options.pretrained is None else [options.pretrained])],
        facts={
            **{name: len(one) for name, one in lengths.items() if hasattr(one, "__len__")},
            "classes": num_classes,
            **digest_of_classes(names),
        },
    )


def _drawn(source: Any, config: Config) -> Any:
    """As many of a split, drawn by ``data.split_seed``: folders and tables often lie class by class.

    Of tar shards the first: they are shuffled as they are written.
    """
    most, seed = config.evaluate.max_examples, config.data.split_seed
    if isinstance(source, TarShards):
        return _Streamed(TarShards(source.urls, shuffle=False), most)
    if most is None or most >= len(source):
        return source
    return Rows(source, np.sort(hold_out_rows(len(source), most, seed=seed)[1]))


class _Streamed:
    """The first examples of tar shards in stored order, read anew for each evaluation.

    They are their own row numbers.
    """

    def __init__(self, shards: TarShards, most: int | None) -> None:
        self._shards, self._most = shards, most

    def share(self, ranks: DistributedContext) -> Iterator[dict[str, Any]]:
        """Those of a rank; a part of the split is passed over by every rank, so as to be the same for all."""
        if self._most is not None:
            return islice(self._shards, ranks.rank, self._most, ranks.world_size)
        self._shards.set_share(ranks.rank, ranks.world_size)
        return iter(self._shards)

    def __getitem__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def origin(self, row: dict[str, Any]) -> str:
        return str(row["__key__"])
