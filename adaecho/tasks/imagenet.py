"""ImageNet classification with ResNet-50 (paper, Table 1), or any classifier of timm on any labelled images.

The paper resizes, crops and flips at random and distorts colours; how strongly it doesn't say.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets.fingerprint import fingerprint_of
from adaecho.datasets.labelled_images import LabelledImages, files_of, find_both
from adaecho.datasets.split import Rows, hold_out_rows, refuse_number
from adaecho.errors import DataError
from adaecho.models.normalise import IMAGENET_MEAN, IMAGENET_STD, Normalise
from adaecho.models.timm_models import timm_model
from adaecho.ranks import Ranks
from adaecho.tasks.base import Split, Task, digest_of_classes, digest_of_held_out
from adaecho.tasks.images import DecodeLabelled, Prediction, ReadAnew, classifier
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
    train, held_out, num_classes, names = _read(config, options)
    split = {}
    if config.data.validation_examples is not None:
        split = digest_of_held_out(held_out)
        held_out = Rows(held_out.dataset, held_out.rows[: config.evaluate.max_examples])
    decode, crop = DecodeLabelled(num_classes), CentreCrop(options.image_size, antialias=options.antialias)
    decode_to_crop = decode.for_augment(crop)
    validation = ReadAnew(
        held_out,
        lambda example: crop(decode_to_crop(example)),
        batch_size=config.evaluate.batch_size,
        threads=max(config.data.num_workers, 1),
    )
    strength = options.colour_distortion
    begun_with = {}
    if options.pretrained is not None:
        digests = fingerprint_of([Path(options.pretrained).expanduser()])
        begun_with = {"pretrained": next(iter(digests.values()))}
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
        model: nn.Module, split: Split, device: torch.device, ranks: Ranks
    ) -> Iterator[Prediction]:
        assert split == "validation", "ImageNet's test split has no public labels"
        for _, examples in validation.batches(ranks.share(len(validation))):
            images = [example["image"] for example in examples]
            labels = torch.tensor([int(example["label"]) for example in examples], device=device)
            yield images, labels, model(torch.from_numpy(np.stack(images)).to(device)).float()

    return classifier(
        predictions,
        label_smoothing=options.label_smoothing,
        names=names,
        name="imagenet",
        source=train,
        decode=decode,
        augment=augment,
        augment_parts=(replace(augment, flip=False), PadCropFlip(padding=0, flip=True)),
        build_model=build_model,
        files=[*files_of(train), *files_of(held_out)],
        fingerprint=begun_with,
        facts={
            "training_images": len(train),
            "validation_images": len(held_out),
            "classes": num_classes,
            **digest_of_classes(names),
            **split,
            **begun_with,
        },
    )


def _read(config: Config, options: Options) -> tuple[Any, Any, int, tuple[str, ...]]:
    """Training and validation sources, the number of classes and their names, if known."""
    path = config.data.path
    if path is None:
        raise DataError(
            "data.path: task imagenet needs a folder, tar shards or a hub id (ILSVRC/imagenet-1k: log in)"
        )
    train, validation = find_both(path, options.validation_path)
    num_classes = options.num_classes or train.num_classes
    if num_classes is None:
        raise DataError(f"task.num_classes=null: {path} doesn't say how many classes there are; set it")
    _check_number(path, "training", train, num_classes)
    if validation is None:
        if config.data.validation_examples is None:
            raise DataError(
                f"data.validation_examples=null: {path} has no validation split; name one with task."
                f"validation_path=, or say how many of its {len(train.source)} training images to hold out"
            )
        number, seed = config.data.validation_examples, config.data.split_seed
        rows, others = hold_out_rows(len(train.source), number, seed=seed)
        held_out = Rows(train.source, others)  # in a drawn order
        return Rows(train.source, np.sort(rows)), held_out, num_classes, train.classes
    refuse_number(config.data.validation_examples, path)
    _check_number(path, "validation", validation, num_classes)
    return train.source, _drawn(validation.source, config), num_classes, train.classes


def _check_number(path: str, split: str, labelled: LabelledImages, num_classes: int) -> None:
    if labelled.num_classes is not None and labelled.num_classes > num_classes:
        raise DataError(
            f"task.num_classes: the {split} split of {path} has {labelled.num_classes} classes, the model "
            f"would have {num_classes}; set it to {labelled.num_classes}"
        )


def _drawn(source: Any, config: Config) -> Any:
    """As many of a split, drawn by ``data.split_seed``: folders and tables often lie class by class."""
    most, seed = config.evaluate.max_examples, config.data.split_seed
    if most is None or most >= len(source):
        return source
    return Rows(source, np.sort(hold_out_rows(len(source), most, seed=seed)[1]))
