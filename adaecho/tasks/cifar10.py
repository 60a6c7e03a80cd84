"""CIFAR-10 with ResNet-32 (paper, Table 1): pad 4, random 32x32 crop, horizontal flip; other depths too.

Data: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, 50,000 + 10,000 images.
The validation split is held out of the 50,000; the test files are read only to evaluate the test split.
"""

from dataclasses import dataclass

import torch
from torch import nn

from adaecho.config.schema import Config
from adaecho.config.tasks import TaskConfig
from adaecho.datasets import cifar10 as storage
from adaecho.datasets.skipped_examples import SkippedExamples
from adaecho.datasets.split import hold_out
from adaecho.models.cifar_resnet import check_depth, cifar_resnet
from adaecho.models.normalise import Normalise
from adaecho.tasks.base import Picture, Split, Task
from adaecho.tasks.images import (
    CLASSIFICATION_METRICS,
    Images,
    PadCropFlip,
    classification_metrics,
    cross_entropy,
    mistakes,
    num_images,
)

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Of each colour over the 50,000 training images.
MEAN = (125.31, 122.95, 113.87)
STD = (62.99, 62.09, 66.70)


@dataclass
class Options(TaskConfig):
    """The keys ``task.*``."""

    depth: int = 32  # layers of the ResNet, 6n + 2: 32 is the paper's, 8 trains on a CPU

    def __post_init__(self) -> None:
        check_depth(self.depth)


def build(config: Config, options: Options) -> Task:
    """The CIFAR-10 task, its training images in memory.

    Raises:
        DataError: ``data.path`` is missing, empty, of the wrong schema, corrupt or not to be reached.
    """
    stored = storage.find(config.data.path)

    def read(part: storage.Part) -> tuple[Images, int]:
        bad = SkippedExamples(config.data.max_bad_examples)
        examples = stored.read(part, bad)
        bad.report()
        return examples, bad.count

    images, skipped = read("train")
    source, validation = hold_out(images, config.data.validation_examples, seed=config.data.split_seed)

    def build_model() -> nn.Module:
        normalise = Normalise(MEAN, STD, channels_last=config.channels_last)
        return nn.Sequential(normalise, cifar_resnet(options.depth, storage.NUM_CLASSES))

    def evaluate(model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        examples = validation if split == "validation" else read("test")[0]
        return classification_metrics(model, examples, batch_size=config.evaluate.batch_size, device=device)

    def pictures(model: nn.Module, number: int, device: torch.device) -> list[Picture]:
        return mistakes(
            model, validation, number, batch_size=config.evaluate.batch_size, device=device, names=CLASSES
        )

    return Task(
        name="cifar10",
        metrics=CLASSIFICATION_METRICS,
        source=source,
        decode=None,
        augment=PadCropFlip(padding=4, flip=True),
        collate=None,
        build_model=build_model,
        loss=cross_entropy,
        weight=num_images,
        evaluate=evaluate,
        pictures=pictures,
        has_test_split=stored.has_test,
        skipped_examples=skipped,
    )
