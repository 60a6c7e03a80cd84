"""What image classifiers share: decoding, loss, metrics over a whole split.

Images stay uint8 [H, W, C] up to the model, whose first layer is ``adaecho.models.normalise.Normalise``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from adaecho.errors import DataError, about_one_example
from adaecho.ranks import SINGLE_PROCESS, DistributedContext
from adaecho.tasks.base import Batch, LossAndWeight, Picture, Split, Task
from adaecho.transforms.photographs import decode_image, decoder_for
from adaecho.transforms.small_images import Images

Prediction = tuple[Iterable[Any], torch.Tensor, torch.Tensor]
"""Of a batch: images uint8 [n, H, W, C], labels int64 [n], and float logits [n, classes] on their device."""

_FIELDS = ("jpg", "jpeg", "png", "webp")  # of an image in a tar shard; its label is in "cls"


@dataclass(frozen=True)
class DecodeLabelled:
    """``decode`` for encoded images with a class; see ``decode_labelled``."""

    num_classes: int
    decode: Callable[[Any], Any] = decode_image
    thread_safe: ClassVar[bool] = True

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        return decode_labelled(example, self.num_classes, self.decode)

    def for_augment(self, augment: Any) -> "DecodeLabelled":
        """What decodes in place of this where nothing but ``augment`` will see the images."""
        return replace(self, decode=decoder_for(augment, "image"))


@about_one_example()
def decode_labelled(
    example: dict[str, Any], num_classes: int, decode: Callable[[Any], Any] = decode_image
) -> dict[str, Any]:
    """``image`` uint8 [H, W, 3] and ``label`` of an example from any of the sources.

    Raises:
        ExampleError: it has no image that can be decoded, or no label of 0 to ``num_classes`` - 1.
    """
    if "__key__" in example:
        field = next(filter(example.__contains__, _FIELDS), None)
        if field is None or "cls" not in example:
            raise ValueError(
                f"{example['__key__']} lacks an image ({', '.join(_FIELDS)}) or its label (cls): the files "
                "of one example must follow one another in the archive (tar --sort=name)"
            )
        image, label = example[field], int(example["cls"])
    else:
        image, label = example["image"], example["label"]
    if label is None or not 0 <= label < num_classes:
        raise ValueError(f"its label {label} is not one of 0 to {num_classes - 1}")
    return {"image": decode(image), "label": np.int64(label)}


def classifier(
    predictions: Callable[[nn.Module, Split, torch.device, DistributedContext], Iterable[Prediction]],
    *,
    label_smoothing: float,
    names: Sequence[str] = (),
    **others: Any,
) -> Task:
    """A task of images with labels: its losses, its metrics, and its mistakes as pictures.

    Args:
        predictions: of a model for a rank's share of a split.
        label_smoothing: of the training loss.
        names: of the classes.
        others: what else a ``Task`` has.
    """

    def evaluate(
        model: nn.Module, split: Split, *, device: torch.device, ranks: DistributedContext = SINGLE_PROCESS
    ) -> dict[str, float]:
        return classification_metrics(predictions(model, split, device, ranks), ranks)

    def pictures(model: nn.Module, number: int, device: torch.device) -> list[Picture]:
        return mistakes(predictions(model, "validation", device, SINGLE_PROCESS), number, names)

    return Task(
        metrics={"accuracy": "max", "cross_entropy": "min"},
        loss=partial(cross_entropy, label_smoothing=label_smoothing),
        weight=num_images,
        evaluate=evaluate,
        pictures=pictures,
        **others,
    )


def cross_entropy(model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> LossAndWeight:
    """Training loss of an image classifier: the sum over images in nats, and their number."""
    labels = batch["label"]
    total = functional.cross_entropy(
        model(batch["image"]).float(), labels, reduction="sum", label_smoothing=label_smoothing
    )
    return total, len(labels)


def num_images(batch: Batch) -> float:
    """The weight that ``cross_entropy`` returns."""
    return len(batch["label"])


def predictions_in_memory(
    read: Callable[[Split], Images], batch_size: int
) -> Callable[[nn.Module, Split, torch.device, DistributedContext], Iterator[Prediction]]:
    """Predictions for a rank's share of a split that ``read`` gives, batch by batch."""

    def predictions(
        model: nn.Module, split: Split, device: torch.device, ranks: DistributedContext
    ) -> Iterator[Prediction]:
        examples = read(split)
        share = ranks.share(len(examples["label"]))
        for begin in range(share.start, share.stop, batch_size):
            end = min(begin + batch_size, share.stop)
            images, labels = (examples[name][begin:end] for name in ("image", "label"))
            logits = model(torch.from_numpy(images).to(device)).float()
            yield images, torch.from_numpy(labels).to(device), logits

    return predictions


def mistakes(predictions: Iterable[Prediction], number: int, names: Sequence[str] = ()) -> list[Picture]:
    """The first images that a model gets wrong, at most so many, as "predicted, true label" (or names)."""

    def name(label: int) -> str:
        return names[label] if label < len(names) else str(label)  # there may be more classes than names

    found: list[Picture] = []
    for images, labels, logits in predictions:
        answers = zip(images, labels.tolist(), logits.argmax(1).tolist(), strict=True)
        found += [
            Picture(_as_colour(image), f"{name(wrong)}, true {name(label)}")
            for image, label, wrong in answers
            if label != wrong
        ]
        if len(found) >= number:
            break
    return found[:number]


def _as_colour(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Grey images to the whole range of brightness, in three channels."""
    if image.shape[-1] == 3:
        return image
    bright = image.astype(float) * (255 / max(int(image.max()), 1))
    return np.repeat(bright.astype(np.uint8), 3, axis=-1)


def classification_metrics(
    predictions: Iterable[Prediction], ranks: DistributedContext = SINGLE_PROCESS
) -> dict[str, float]:
    """Accuracy and mean cross entropy (nats) over all examples of a split, of which each rank has a share."""
    number = 0
    correct: torch.Tensor | int = 0  # sums that stay on the device: to ask for them would be to wait for it
    entropy: torch.Tensor | float = 0.0
    for _, labels, logits in predictions:
        number += len(labels)
        correct = correct + (logits.argmax(1) == labels).sum()
        entropy = entropy + functional.cross_entropy(logits, labels, reduction="sum").detach().double()
    right, nats, all_examples = ranks.sums([float(correct), float(entropy), number])
    return {"accuracy": right / all_examples, "cross_entropy": nats / all_examples}


def read_batches(
    source: Any, prepare: Callable[[Any], Any], rows: Iterable[Any], *, batch_size: int, threads: int
) -> Iterator[tuple[Sequence[Any], list[Any]]]:
    """Row numbers and prepared examples of each batch of some rows.

    Args:
        source: ``source[row]`` is an example, ``source.origin(row)`` its name.
        prepare: of one example: decodes and resizes.
        rows: which.
        batch_size: examples at once.
        threads: that read and prepare.

    Raises:
        DataError: an example can't be prepared: a metric over the others would be another metric.
    """

    def one(row: Any) -> Any:
        try:
            return prepare(source[row])
        except ValueError as error:
            raise DataError(
                f"validation, {source.origin(row)}: {error}; mend it, or take it out of the split"
            ) from error

    rows = iter(rows)
    with ThreadPoolExecutor(threads) as pool:
        while part := list(islice(rows, batch_size)):
            yield part, list(pool.map(one, part))
