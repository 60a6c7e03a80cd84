"""CIFAR-10 with ResNet-32 (paper, Table 1): pad 4, random 32x32 crop, horizontal flip; other depths too.

Data: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, 50,000 + 10,000 images.
The validation split is held out of the 50,000; the test files are read only to evaluate the test split.
Training images lie in memory, or, as encoded images in tar shards, are streamed and decoded as they come.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets import cifar10 as storage
from adaecho.datasets.cifar10 import Cifar10Shards, find_shards, read_shards
from adaecho.datasets.split import first_of, hold_out
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import ConfigError, ExampleError
from adaecho.models.cifar_resnet import cifar_resnet
from adaecho.models.normalise import Normalise
from adaecho.ranks import Ranks
from adaecho.records.trials import digest
from adaecho.tasks.base import HELD_OUT, Split, Task, digest_of_classes
from adaecho.tasks.images import Prediction, classifier, decode_labelled, predict
from adaecho.tasks.options import Cifar10Options as Options
from adaecho.transforms.small_images import Images, PadCropFlip

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Of each colour over the 50,000 training images.
MEAN = (125.31, 122.95, 113.87)
STD = (62.99, 62.09, 66.70)


@dataclass(frozen=True)
class _Data:
    """Where a run's examples come from.

    Attributes:
        source: of training examples.
        decode: of one training example; None where they are decoded.
        validation: the whole split.
        read_test: None where there is no test split.
        skipped: bad examples that were left out.
        files: of all splits.
        classes: their names, where the data tells them.
    """

    source: Any
    decode: Callable[[Any], Any] | None
    validation: Images
    read_test: Callable[[], Images] | None
    skipped: int
    files: Sequence[str | Path]
    classes: tuple[str, ...] = ()


def build(config: Config, options: Options) -> Task:
    """The CIFAR-10 task, its training images in memory or streamed from shards.

    Raises:
        DataError: ``data.path`` is missing, empty, of the wrong schema, corrupt or not to be reached.
        ConfigError: a key has no meaning for the data that ``data.path`` names.
    """
    shards = find_shards(config.data.path, options.validation_shards, seed=config.seed)
    data = _in_memory(config, options) if shards is None else _streamed(config, options, shards)

    def build_model() -> nn.Module:
        normalise = Normalise(MEAN, STD, channels_last=config.channels_last)
        return nn.Sequential(normalise, cifar_resnet(options.depth, storage.NUM_CLASSES, options.channels))

    validation = {name: array[: config.evaluate.max_examples] for name, array in data.validation.items()}

    def predictions(
        model: nn.Module, split: Split, device: torch.device, ranks: Ranks
    ) -> Iterator[Prediction]:
        if split == "validation":
            examples = validation
        else:
            assert data.read_test is not None, "there is no test split"
            examples = data.read_test()
        batch_size = config.evaluate.batch_size
        return predict(model, examples, batch_size=batch_size, device=device, ranks=ranks)

    return classifier(
        predictions,
        label_smoothing=options.label_smoothing,
        names=data.classes or CLASSES,
        name="cifar10",
        source=data.source,
        decode=data.decode,
        augment=PadCropFlip(padding=4, flip=True),
        augment_parts=(PadCropFlip(padding=4, flip=False), PadCropFlip(padding=0, flip=True)),
        build_model=build_model,
        has_test_split=data.read_test is not None,
        skipped_examples=data.skipped,
        facts={
            HELD_OUT: digest(data.validation["image"].tobytes())[:16],
            **digest_of_classes(data.classes),
        },
        files=data.files,
    )


def _in_memory(config: Config, options: Options) -> _Data:
    """All training images decoded once, part of them held out."""
    if options.validation_shards is not None:
        raise ConfigError(
            f"task.validation_shards={options.validation_shards}: only for data.path= of tar shards; of "
            "other data data.validation_examples are held out"
        )
    stored = storage.find(config.data.path)
    names = stored.names()  # before anything is decoded

    def read(part: storage.Part) -> tuple[Images, int]:
        bad = SkippedExamples(config.data.max_bad_examples)
        examples = stored.read(part, decode, bad)
        bad.report()
        return examples, bad.count

    images, skipped = read("train")
    source, validation = hold_out(images, config.data.validation_examples, seed=config.data.split_seed)
    source = first_of(source, options.training_examples)
    read_test = (lambda: read("test")[0]) if stored.has_test else None
    return _Data(source, None, validation, read_test, skipped, stored.files(), names)


def _streamed(config: Config, options: Options, shards: Cifar10Shards) -> _Data:
    """Training images as they come; the validation shards in memory."""
    if options.training_examples is not None:
        raise ConfigError(
            f"task.training_examples={options.training_examples}: shards are read whole; set it to null, or "
            "name fewer shards in data.path"
        )
    if config.data.validation_examples is not None:
        raise ConfigError(
            f"data.validation_examples={config.data.validation_examples}: shards have a validation split of "
            "their own; set data.validation_examples=null (evaluate.max_examples takes a part of it)"
        )
    validation = read_shards(shards.validation, decode, SkippedExamples(0))
    test = shards.test
    return _Data(
        shards.train,
        decode,
        validation,
        None if test is None else lambda: read_shards(test, decode, SkippedExamples(0)),
        skipped=0,
        files=[
            url for part in (shards.train, shards.validation, test) if part is not None for url in part.urls
        ],
    )


def decode(example: dict[str, Any]) -> dict[str, Any]:
    """``image`` uint8 [32, 32, 3] and ``label`` of an encoded example; see ``decode_labelled``.

    Raises:
        ExampleError: it has no image of that size, or no label of 0 to 9.
    """
    decoded = decode_labelled(example, storage.NUM_CLASSES)
    shape = decoded["image"].shape
    if shape != (storage.SIDE, storage.SIDE, 3):
        raise ExampleError(
            f"the image has {shape[0]}x{shape[1]} pixels, {storage.SIDE}x{storage.SIDE} are needed"
        )
    return decoded
