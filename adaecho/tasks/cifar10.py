"""CIFAR-10 with ResNet-32 (paper, Table 1): pad 4, random 32x32 crop, horizontal flip; other depths too.

Data: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, 50,000 + 10,000 images.
The validation split is held out of the 50,000; the test files are read only to evaluate the test split.
Training images lie in memory, or, as encoded images in tar shards, are read and decoded as they come.
"""

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets import cifar10 as storage
from adaecho.datasets.labelled_images import read_shards
from adaecho.datasets.split import first_of, hold_out, refuse_number
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import ConfigError, DataError, ExampleError
from adaecho.models.cifar_resnet import cifar_resnet
from adaecho.models.normalise import Normalise
from adaecho.shards import TarShards
from adaecho.shards.tar_shards import shard_urls
from adaecho.tasks.base import Split, Task
from adaecho.tasks.images import classifier, decode_labelled, predictions_in_memory
from adaecho.tasks.options import Cifar10Options as Options
from adaecho.transforms.small_images import Images, PadCropFlip

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Of each colour over the 50,000 training images.
MEAN = (125.31, 122.95, 113.87)
STD = (62.99, 62.09, 66.70)


def build(config: Config, options: Options) -> Task:
    """The CIFAR-10 task, its training images in memory or streamed from shards.

    Raises:
        DataError: ``data.path`` is missing, empty, of the wrong schema, corrupt or not to be reached.
        ConfigError: a key has no meaning for the data that ``data.path`` names.
    """
    path = config.data.path
    is_sharded = path is not None and (".tar" in path or any(Path(path).expanduser().glob("train*.tar")))
    data = _streamed(config, options) if is_sharded else _in_memory(config, options)
    validation, read_test = data.pop("validation"), data.pop("read_test")
    held_out = {name: array[: config.evaluate.max_examples] for name, array in validation.items()}

    def build_model() -> nn.Module:
        normalise = Normalise(MEAN, STD, channels_last=config.channels_last)
        return nn.Sequential(normalise, cifar_resnet(options.depth, storage.NUM_CLASSES, options.channels))

    def read(split: Split) -> Images:
        return held_out if split == "validation" else read_test()

    return classifier(
        predictions_in_memory(read, config.evaluate.batch_size),
        label_smoothing=options.label_smoothing,
        names=CLASSES,
        name="cifar10",
        augment=PadCropFlip(padding=4, flip=True),
        augment_parts=(PadCropFlip(padding=4, flip=False), PadCropFlip(padding=0, flip=True)),
        build_model=build_model,
        has_test_split=read_test is not None,
        **data,
    )


def _in_memory(config: Config, options: Options) -> dict[str, Any]:
    """All training images decoded once, part of them held out."""
    if options.validation_shards is not None:
        raise ConfigError(
            f"task.validation_shards={options.validation_shards}: only for data.path= of tar shards; of "
            "other data data.validation_examples are held out"
        )
    stored = storage.find(config.data.path, decode)
    bad = SkippedExamples(config.data.max_bad_examples)
    images = stored.read("train", bad)
    source, validation = hold_out(images, config.data.validation_examples, seed=config.data.split_seed)
    read_test = partial(stored.read, "test", SkippedExamples(config.data.max_bad_examples))
    return {
        "source": first_of(source, options.training_examples),
        "validation": validation,
        "read_test": read_test if stored.has_test else None,
        "skipped_examples": bad.count,
        "files": stored.files,
    }


def _streamed(config: Config, options: Options) -> dict[str, Any]:
    """Training images as they come; the validation shards in memory."""
    path, top = str(config.data.path), Path(str(config.data.path)).expanduser()
    if options.training_examples is not None:
        raise ConfigError(
            f"task.training_examples={options.training_examples}: shards are read whole; set it to null, or "
            "name fewer shards in data.path"
        )
    refuse_number(config.data.validation_examples, path)
    urls = {name: sorted(map(str, top.glob(f"{name}*.tar"))) for name in ("train", "val", "test")}
    train = urls["train"] or [path]
    held_out = urls["val"] if options.validation_shards is None else [options.validation_shards]
    if not held_out:
        raise DataError(
            f"data.path={path}: shards are streamed, so none of them can be held out; name the validation "
            "shards with task.validation_shards="
        )
    try:  # one after another: they were shuffled as they were written
        source = TarShards(train, seed=config.seed, open_shards=1)
        urls["val"] = shard_urls(held_out)
    except ValueError as error:
        raise DataError(f"data.path, task.validation_shards: {error}") from error

    def read_all(part: str) -> Images:
        return storage.decoded(read_shards(urls[part], f"{part} shards"), decode, SkippedExamples(0))

    return {
        "source": source,
        "decode": decode,
        "validation": read_all("val"),
        "read_test": partial(read_all, "test") if urls["test"] else None,
        "files": [*source.urls, *urls["val"], *urls["test"]],
    }


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


decode.thread_safe = True  # type: ignore[attr-defined]
