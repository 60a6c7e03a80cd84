"""The task cifar10: classify CIFAR-10 images with ResNet-32 (paper, Table 1) or a ResNet of another depth.

Images are padded by 4 pixels, cropped to 32x32 and flipped at random. The dataset (A. Krizhevsky, "Learning
Multiple Layers of Features from Tiny Images", 2009) has 50,000 training and 10,000 test images. The
validation split is held out of the training images.
"""

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from adaecho.config.schema import Config
from adaecho.datasets import cifar10 as storage
from adaecho.datasets.labeled_images import open_shards, read_shards
from adaecho.datasets.split import first_of, refuse_number, train_validation_split
from adaecho.datasets.storage import BadExampleBudget
from adaecho.errors import ConfigError, DataError, ExampleError
from adaecho.models.images import Normalize, cifar_resnet
from adaecho.tasks.base import Split, Task
from adaecho.tasks.images import DecodeLabeled, classifier, predictions_in_memory
from adaecho.tasks.options import Cifar10Options as Options
from adaecho.transforms.small_images import Images, PadCropFlip

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Mean and standard deviation of each color over the 50,000 training images, for pixel values 0 to 255.
MEAN = (125.31, 122.95, 113.87)
STD = (62.99, 62.09, 66.70)


def build(config: Config, options: Options) -> Task:
    """Build the task. Images are kept in memory, or streamed if ``data.path`` contains tar shards."""
    path = config.data.path
    is_sharded = path is not None and (".tar" in path or any(Path(path).expanduser().glob("train*.tar")))
    data = _streamed(config, options) if is_sharded else _in_memory(config, options)
    validation, read_test = data.pop("validation"), data.pop("read_test")
    held_out = {name: array[: config.evaluate.max_examples] for name, array in validation.items()}

    def build_model() -> nn.Module:
        normalize = Normalize(MEAN, STD, channels_last=config.channels_last)
        return nn.Sequential(normalize, cifar_resnet(options.depth, storage.NUM_CLASSES, options.channels))

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
    """Decode all training images once, keep them in memory, and hold out the validation split."""
    if options.validation_shards is not None:
        raise ConfigError(
            f"task.validation_shards={options.validation_shards}: needs tar shards in data.path; set it to "
            "null, and data.validation_examples to the number of images to hold out"
        )
    most_bad = config.data.max_bad_examples
    stored, bad = storage.find(config.data.path, decode), BadExampleBudget(most_bad)
    images = stored.read("train", bad)
    source, validation = train_validation_split(
        images, config.data.validation_examples, seed=config.data.split_seed
    )
    return {
        "source": first_of(source, options.training_examples),
        "validation": validation,
        "read_test": partial(stored.read, "test", BadExampleBudget(most_bad)) if stored.has_test else None,
        "skipped_examples": len(bad.found),
        "files": stored.files,
    }


def _streamed(config: Config, options: Options) -> dict[str, Any]:
    """Stream the training images from tar shards, and keep the validation images in memory."""
    path, top = str(config.data.path), Path(str(config.data.path)).expanduser()
    if options.training_examples is not None:
        raise ConfigError(
            f"task.training_examples={options.training_examples}: does not apply to tar shards; set it to "
            "null, or name fewer shards in data.path"
        )
    refuse_number(config.data.validation_examples, path)
    urls = {name: sorted(map(str, top.glob(f"{name}*.tar"))) for name in ("train", "val", "test")}
    held_out = urls["val"] if options.validation_shards is None else [options.validation_shards]
    if not held_out:
        raise DataError(
            f"data.path={path}: no split can be held out from streamed shards; name the validation shards "
            "with task.validation_shards="
        )
    # Reading one shard at a time is random enough, because the shards were written in random order.
    source = open_shards(urls["train"] or [path], "data.path", seed=config.seed, open_shards=1)
    urls["val"] = open_shards(held_out, "task.validation_shards").urls

    def read_all(split: str) -> Images:
        examples = read_shards(urls[split], f"{split} shards")
        return storage.decode_all(examples, decode, BadExampleBudget(config.data.max_bad_examples))

    return {
        "source": source,
        "decode": decode,
        "validation": read_all("val"),
        "read_test": partial(read_all, "test") if urls["test"] else None,
        "files": [*source.urls, *urls["val"], *urls["test"]],
    }


def decode(example: dict[str, Any]) -> dict[str, Any]:
    """Decode an example to ``image``, uint8 [32, 32, 3], and ``label`` (see ``DecodeLabeled``)."""
    decoded = DecodeLabeled(storage.NUM_CLASSES)(example)
    height, width, _ = decoded["image"].shape
    if (height, width) != (storage.SIDE, storage.SIDE):
        raise ExampleError(f"the image has {height}x{width} pixels, expected {storage.SIDE}x{storage.SIDE}")
    return decoded


decode.thread_safe = True  # type: ignore[attr-defined]
