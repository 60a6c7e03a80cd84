"""Interface of a workload: data, augmentation, model, loss and metrics."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from adaecho.errors import ConfigError, DataError
from adaecho.records.trials import check_metric, digest

Batch = Any
"""Nested dicts and tuples of tensors, as ``collate`` returns them. If AdaScale splits the batch into
micro-batches, the first axis of each tensor is the examples. A list holds one item per example, for example
boxes, whose number differs between images."""

LossAndWeight = tuple[torch.Tensor, torch.Tensor | float]
"""The sum of a batch's losses, a scalar with gradient, and the sum of weights (examples, tokens, boxes)."""

Metrics = dict[str, float]
Direction = Literal["max", "min"]
Split = Literal["validation", "test"]

# Facts of the data that give class labels and token numbers their meaning.
CLASS_NAMES, TOKENIZER = "class_names", "tokenizer_sha256"


def digest_of_classes(names: Sequence[str]) -> dict[str, str]:
    """The fact CLASS_NAMES: a digest of the class names in label order; empty without names."""
    return {CLASS_NAMES: digest("\n".join(names).encode(errors="surrogatepass"))[:16]} if names else {}


def check_same_meaning(of_run: dict[str, Any], facts: dict[str, Any]) -> None:
    """Compare the facts of a run's training data with those of the present data.

    Raises:
        DataError: a label means another class, or a token number another token, than in training.
    """
    for key, what in ((CLASS_NAMES, "class names"), (TOKENIZER, "token numbers")):
        if None not in (then := of_run.get(key), now := facts.get(key)) and then != now:
            raise DataError(
                f"data.path: the {what} differ from those of the run's training data, so the model's outputs "
                "have another meaning; set data.path to the training data"
            )


Box = tuple[tuple[float, float, float, float], str]
"""x1, y1, x2, y2 in pixels, and a caption."""


@dataclass(frozen=True)
class Picture:
    """One validation image for ``python -m adaecho.show``.

    Attributes:
        image: uint8 [H, W, 3].
        title: text above the image.
        true, predicted: boxes; None if the task has no boxes.
    """

    image: Any
    title: str
    true: list[Box] | None = None
    predicted: list[Box] | None = None


@dataclass(frozen=True)
class Task:
    """A workload: data, model, loss and metrics.

    Attributes:
        metrics: every metric that ``evaluate`` reports, and whether "max" or "min" is better.
        source: training examples for ``EchoLoader``: indexable with a length, or an iterable.
        decode: deterministic, from stored bytes to arrays; None if examples are stored decoded.
        augment: ``augment(example, rng)``; a vectorised one has ``augment.block(examples, keys)`` too.
        augment_parts: two functions (once, each_time) whose composition equals ``augment``. With
            ``echo.split_augmentation=true`` the echo lies between them. None if the task has no such parts.
        collate: from a list of examples to a batch; None for ``EchoLoader``'s default.
        build_model: returns a freshly initialised model. The caller seeds torch's global generator.
        loss: ``loss(model, batch)``, the sum of the losses and the sum of their weights. So the mean over
            micro-batches is exact, even if they hold different numbers of tokens or boxes.
        evaluate: ``evaluate(model, split, device=...)``, the metrics on a whole split of a model in eval mode
            on that device. With a parameter ``ranks=`` (see ``adaecho.ranks``) it may evaluate the share of
            this rank only; else every rank evaluates the whole split. The metrics of the first rank count.
        has_test_split: whether there is a test split. It is evaluated once, when a run ends.
        weight: the weight that ``loss`` will return, computed from the batch alone. Without it the graphs of
            all micro-batches are kept in memory. A plain number depends on the batch size alone, so it is
            equal on all ranks. A weight that depends on the contents is a tensor.
        num_examples: in one epoch, for schedules in epochs; default: the length of the source.
        skipped_examples: bad examples skipped by ``build``.
        files: paths, or urls of tar shards, of all splits. A checkpoint stores a digest of their names and
            sizes, and a run is not resumed with different files.
        fingerprint: other facts that must not change on a resume, for example the digest of a tokenizer.
        facts: of the data, for ``summary.json``.
        at_end: returns entries for the summary of a finished run, for example a sample of generated text.
            An entry whose name the summary has already is dropped.
        pictures: ``pictures(model, number, device)``, at most ``number`` images with the predictions of a
            model in eval mode. Classifiers return mistakes only.
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
            try:
                check_metric(metric)
            except ValueError as error:
                raise ConfigError(f"task {self.name}: {error}") from None
            if direction not in get_args(Direction):
                raise ConfigError(
                    f"task {self.name}: metrics has {direction!r} for {metric}; use 'max' if a higher value "
                    "is better, else 'min'"
                )

    @property
    def epoch_examples(self) -> int | None:
        """Examples of one epoch; None if neither the task nor the length of its source says it."""
        if self.num_examples is not None:
            return self.num_examples
        source = self.source
        fields = tuple(source.values()) if isinstance(source, dict) else source
        if isinstance(fields, tuple) and all(isinstance(one, np.ndarray | torch.Tensor) for one in fields):
            source = next(iter(fields), ())  # one column of the examples
        with suppress(TypeError):  # the source has no length
            return len(source)
        return None

    def checked(self, metrics: Any) -> Metrics:
        """The metrics that ``evaluate`` has returned.

        Raises:
            ConfigError: a metric is missing.
        """
        if not isinstance(metrics, Mapping) or self.metrics.keys() - metrics.keys():
            raise ConfigError(
                f"task {self.name}: evaluate returned {metrics!r:.200}, expected {{metric: number}} with "
                f"{', '.join(self.metrics)}"
            )
        return {key: one if isinstance(one, int | float) else float(one) for key, one in metrics.items()}
