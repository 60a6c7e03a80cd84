"""Code that the image classification tasks share: decoding, loss, and metrics over a split.

Images are uint8 [H, W, C] until the first layer of the model normalizes them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from adaecho.config.schema import Config
from adaecho.datasets.storage import BadExampleBudget
from adaecho.errors import about_one_example
from adaecho.ranks import SINGLE_PROCESS, DistributedContext
from adaecho.tasks.base import Batch, LossAndWeight, Metrics, Picture, Split, Task
from adaecho.transforms.photographs import decode_image, decoder_for
from adaecho.transforms.small_images import Images

Prediction = tuple[Iterable[Any], torch.Tensor, torch.Tensor]
"""Images, uint8 [n, H, W, C], and, on the device, labels, int64 [n], and logits, float [n, classes]."""

Predictions = Callable[[nn.Module, Split, torch.device, DistributedContext], Iterable[Prediction]]
"""A function that yields the predictions of a model, batch by batch, for a rank's share of a split."""

_FIELDS = ("jpg", "jpeg", "png", "webp")  # file extensions of images in tar shards; that of labels is "cls"


@dataclass(frozen=True)
class DecodeLabeled:
    """A ``decode`` function for labeled images, from tar shards as well as from files and tables.

    It returns a dict of ``image``, uint8 [H, W, 3], and ``label``, int64 from 0 to ``num_classes`` - 1.
    """

    num_classes: int
    decode: Callable[[Any], Any] = decode_image
    thread_safe: ClassVar[bool] = True

    @about_one_example()
    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        if "__key__" in example:
            field = next(filter(example.__contains__, _FIELDS), None)
            if field is None or "cls" not in example:
                raise ValueError(
                    f"{example['__key__']} lacks an image ({', '.join(_FIELDS)}) or its label (cls): the "
                    "files of one example must be adjacent in the archive (tar --sort=name)"
                )
            image, label = example[field], int(example["cls"])
        else:
            image, label = example["image"], example["label"]
        if label is None or not 0 <= label < self.num_classes:
            raise ValueError(f"its label {label} is not between 0 and {self.num_classes - 1}")
        return {"image": self.decode(image), "label": np.int64(label)}

    def for_augment(self, augment: Any) -> "DecodeLabeled":
        """Return a faster decoder, which decodes only as much of an image as ``augment`` needs."""
        return replace(self, decode=decoder_for(augment, "image"))


def classifier(
    predictions: Predictions, *, label_smoothing: float, names: Sequence[str] = (), **others: Any
) -> Task:
    """Build a task that trains an image classifier with the cross-entropy loss.

    Args:
        predictions: a function that evaluates a model on a split. It yields batches of images, labels and
            logits, from which the task computes its metrics.
        label_smoothing: label smoothing of the training loss.
        names: names of the classes.
        others: the remaining arguments of ``Task``, such as ``name``, ``source`` and ``build_model``.
    """

    def evaluate(
        model: nn.Module, split: Split, *, device: torch.device, ranks: DistributedContext = SINGLE_PROCESS
    ) -> Metrics:
        return classification_metrics(predictions(model, split, device, ranks), ranks)

    def pictures(model: nn.Module, number: int, device: torch.device) -> list[Picture]:
        wrong = mistakes(predictions(model, "validation", device, SINGLE_PROCESS), names)
        return list(islice(wrong, number))

    return Task(
        metrics={"accuracy": "max", "cross_entropy": "min"},
        loss=partial(cross_entropy, label_smoothing=label_smoothing),
        weight=lambda batch: len(batch["label"]),
        evaluate=evaluate,
        pictures=pictures,
        **others,
    )


def cross_entropy(model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> LossAndWeight:
    """Return the cross entropy of a batch in nats, summed over images, and the number of images."""
    labels = batch["label"]
    total = functional.cross_entropy(
        model(batch["image"]).float(), labels, reduction="sum", label_smoothing=label_smoothing
    )
    return total, len(labels)


def predictions_in_memory(read: Callable[[Split], Images], batch_size: int) -> Predictions:
    """Return a function that yields a model's predictions for images in memory, batch by batch."""

    def predictions(
        model: nn.Module, split: Split, device: torch.device, ranks: DistributedContext
    ) -> Iterator[Prediction]:
        examples = read(split)
        share = ranks.share(len(examples["label"]))
        for begin in range(share.start, share.stop, batch_size):
            rows = slice(begin, min(begin + batch_size, share.stop))
            images, labels = examples["image"][rows], torch.from_numpy(examples["label"][rows]).to(device)
            yield images, labels, model(torch.from_numpy(images).to(device)).float()

    return predictions


def mistakes(predictions: Iterable[Prediction], names: Sequence[str] = ()) -> Iterator[Picture]:
    """Yield the images with wrong predictions, titled with the predicted and the true class."""

    def name(label: int) -> str:
        return names[label] if label < len(names) else str(label)  # the model may have more classes

    for images, labels, logits in predictions:
        for image, label, predicted in zip(images, labels.tolist(), logits.argmax(1).tolist(), strict=True):
            if label != predicted:
                yield Picture(image, f"{name(predicted)}, true {name(label)}")


def classification_metrics(
    predictions: Iterable[Prediction], ranks: DistributedContext = SINGLE_PROCESS
) -> Metrics:
    """Return the accuracy and mean cross entropy (in nats) of a whole split, on every rank.

    Args:
        predictions: images, labels and logits for this rank's share of the split.
    """
    number = 0
    # The sums stay on the device until the end, because reading them would wait for the device.
    correct: torch.Tensor | int = 0
    entropy: torch.Tensor | float = 0.0
    for _, labels, logits in predictions:
        number += len(labels)
        correct = correct + (logits.argmax(1) == labels).sum()
        entropy = entropy + functional.cross_entropy(logits, labels, reduction="sum").detach().double()
    right, nats, all_examples = ranks.sums([float(correct), float(entropy), number])
    return {"accuracy": right / all_examples, "cross_entropy": nats / all_examples}


class EvaluationBatches:
    """Reads validation examples from storage in each evaluation, instead of keeping them in memory."""

    def __init__(self, source: Any, prepare: Callable[[Any], Any], config: Config) -> None:
        # source[row] returns an example, and source.origin(row) its name for messages. prepare decodes and
        # resizes one example.
        self._source, self._prepare = source, prepare
        self._batch_size, self._threads = config.evaluate.batch_size, max(config.data.num_workers, 1)
        self._bad = BadExampleBudget(config.data.max_bad_examples)

    def read(self, rows: Iterable[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield batches as two lists: the indices of the examples, and the decoded, resized examples."""

        def attempt(row: Any) -> tuple[Any, Any, str]:
            try:
                return row, self._prepare(self._source[row]), ""
            except ValueError as error:
                return row, None, f"validation, {self._source.origin(row)}: {error}"

        rows, bad = iter(rows), list[str]()
        with ThreadPoolExecutor(self._threads) as pool:
            while part := list(pool.map(attempt, islice(rows, self._batch_size))):
                bad += [reason for *_, reason in part if reason]
                if usable := [(row, example) for row, example, reason in part if not reason]:
                    yield [row for row, _ in usable], [example for _, example in usable]
        # If there are too many bad examples, the error is raised only here, after the last batch.
        self._bad.add(*(line for line in bad if line not in self._bad.found))
