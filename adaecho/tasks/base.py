"""The interface between a task and the trainer: data, augmentation, model, loss and metrics."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from adaecho.errors import ConfigError, DataError

Batch = Any
"""A batch as ``collate`` returns it: nested dicts and tuples of tensors. A batch may also contain lists with
one item per example, for example the boxes of each image, whose number varies. If AdaScale splits the batch
into micro-batches, the first axis of every tensor must be the axis of examples."""

LossAndWeight = tuple[torch.Tensor, torch.Tensor | float]
"""The sum of a batch's losses (a scalar with gradient) and of their weights."""

Metrics = dict[str, float]
Direction = Literal["max", "min"]
Split = Literal["validation", "test"]

# Keys of the facts that define which class a label means, and which token a token number means.
CLASS_NAMES, TOKENIZER = "class_names", "tokenizer_sha256"


def digest_of_classes(names: Sequence[str]) -> dict[str, str]:
    """Return ``{CLASS_NAMES: a hash of the ordered class names}``; empty without class names."""
    text = "\n".join(names).encode(errors="surrogatepass")
    return {CLASS_NAMES: hashlib.sha256(text).hexdigest()[:16]} if names else {}


def check_same_meaning(of_run: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raise DataError if the class names or the tokenizer differ from those of the training data."""
    # of_run has the facts about the training data, and facts those about the current data.
    for key, what in ((CLASS_NAMES, "class names"), (TOKENIZER, "token numbers")):
        if None not in (then := of_run.get(key), now := facts.get(key)) and then != now:
            raise DataError(
                f"data.path: the {what} differ from those of the run's training data, so the model's outputs "
                "have a different meaning; set data.path to the training data"
            )


Box = tuple[tuple[float, float, float, float], str]
"""The corners x1, y1, x2, y2 of a box in pixels, and its caption."""


@dataclass(frozen=True)
class Picture:
    """One validation image that ``python -m adaecho.show`` draws.

    Attributes:
        image: the pixels, as uint8 [H, W, 1 or 3].
        title: the text above the image.
        true, predicted: the true and the predicted boxes; None if the task has no boxes.
    """

    image: Any
    title: str
    true: list[Box] | None = None
    predicted: list[Box] | None = None


@dataclass(frozen=True)
class Task:
    """A workload that can be trained, consisting of data, model, loss and metrics.

    Attributes:
        name: the name of the task.
        metrics: every metric that ``evaluate`` reports, and whether "max" or "min" is better.
        source: the training examples for ``EchoLoader``, which are either an iterable or an object with a
            length and an index operator.
        decode: a deterministic function that converts an example from stored bytes to arrays. None if the
            examples are stored decoded.
        augment: ``augment(example, rng)`` returns the augmented example, with random numbers from ``rng``. A
            vectorized augmentation also has a method ``augment.block(examples, keys)``.
        augment_parts: two functions (once, each_time) that together do the same as ``augment``. With
            ``echo.split_augmentation=true``, examples are echoed between the two.
        collate: combines a list of examples into a batch; None for ``EchoLoader``'s default.
        build_model: returns a newly initialized model. The caller seeds torch's global generator.
        loss: ``loss(model, batch)`` returns the sum of the losses and the sum of their weights. The trainer
            adds up both over all micro-batches and ranks, and divides the two totals.
        evaluate: ``evaluate(model, split, device=...)`` returns the metrics over a whole split. The model is
            in eval mode and on that device. If the function has a parameter ``ranks`` (see
            ``adaecho.ranks``), each rank may evaluate only its share of the split. The metrics that the first
            rank returns are recorded.
        has_test_split: whether there is a test split. It is evaluated once, at the end of a run.
        weight: ``weight(batch)`` returns the weight that ``loss`` will return, without calling the model.
            This function saves memory if a step has several micro-batches. It returns a plain number if the
            weight depends only on the batch size, and a tensor if it depends on the contents of the batch.
        num_examples: the number of examples in one epoch, which schedules in epochs need. None for the length
            of ``source``.
        skipped_examples: the number of bad examples that ``build`` skipped.
        files: the paths of the files of all splits, or the urls of tar shards. A run cannot be resumed if
            their names or sizes have changed.
        fingerprint: other facts that must not change when a run is resumed, for example the digest of a
            tokenizer.
        facts: facts about the data to record in ``summary.json``.
        at_end: ``at_end(model, device)`` returns further entries for the summary of a finished run, for
            example a sample of generated text.
        pictures: ``pictures(model, number, device)`` returns at most ``number`` images with the predictions
            of a model in eval mode. For classifiers, these are only images with wrong predictions.
    """

    name: str
    metrics: dict[str, Direction]
    source: Any
    build_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], LossAndWeight]
    evaluate: Callable[..., Metrics]
    decode: Callable[[Any], Any] | None = None
    augment: Callable[..., Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    augment_parts: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    has_test_split: bool = False
    weight: Callable[[Batch], torch.Tensor | float] | None = None
    num_examples: int | None = None
    skipped_examples: int = 0
    files: Sequence[str | os.PathLike[str]] = ()
    fingerprint: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    at_end: Callable[[nn.Module, torch.device], dict[str, Any]] | None = None
    pictures: Callable[[nn.Module, int, torch.device], list[Picture]] | None = None

    def __post_init__(self) -> None:
        for metric, direction in self.metrics.items():
            if direction not in get_args(Direction):
                raise ConfigError(
                    f"task {self.name}: metrics has {direction!r} for {metric}; use 'max' if a higher value "
                    "is better, else 'min'"
                )

    @property
    def epoch_examples(self) -> int | None:
        """The number of examples in one epoch; None if it is unknown."""
        if self.num_examples is not None:
            return self.num_examples
        source = self.source
        fields = tuple(source.values()) if isinstance(source, dict) else source
        if isinstance(fields, tuple) and all(isinstance(one, np.ndarray | torch.Tensor) for one in fields):
            source = next(iter(fields), ())  # all arrays have one item per example, so use the first
        with suppress(TypeError):  # the source has no length
            return len(source)
        return None

    def checked(self, metrics: Any) -> Metrics:
        """Check that ``evaluate`` has returned all metrics, and return them as plain numbers."""
        if not isinstance(metrics, Mapping) or self.metrics.keys() - metrics.keys():
            raise ConfigError(
                f"task {self.name}: evaluate returned {metrics!r:.200}, expected {{metric: number}} with "
                f"{', '.join(self.metrics)}"
            )
        return {key: one if isinstance(one, int | float) else float(one) for key, one in metrics.items()}
