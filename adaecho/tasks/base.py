"""What a workload is: data, augmentation, model, loss, metrics. A new one is one file and one YAML."""

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
"""A nesting of dicts and tuples of tensors, as ``collate`` makes it. Where AdaScale deals it to micro-batches
the first axis of each is that of the examples; a list holds one item for each example
(boxes, say, of which each image has another number)."""

LossAndWeight = tuple[torch.Tensor, torch.Tensor | float]
"""The sum of a batch's losses, a scalar with gradient, and of their weights (examples, tokens, boxes)."""

Direction = Literal["max", "min"]
Split = Literal["validation", "test"]

# Of facts of the data: what tells that a number means the same class, or token.
CLASS_NAMES, TOKENIZER = "class_names", "tokenizer_sha256"


def digest_of_classes(names: Sequence[str]) -> dict[str, str]:
    """Of ``Task.facts``: what tells the classes' names, in the order of their labels; none without names."""
    return {CLASS_NAMES: digest("\n".join(names).encode(errors="surrogatepass"))[:16]} if names else {}


def check_same_meaning(of_run: dict[str, Any], facts: dict[str, Any]) -> None:
    """Compare the facts of a run's data with those of what is there now.

    Raises:
        DataError: a number means another class, or another token, than in its training.
    """
    for key, what in ((CLASS_NAMES, "classes have other names"), (TOKENIZER, "text makes another tokenizer")):
        if None not in (then := of_run.get(key), now := facts.get(key)) and then != now:
            raise DataError(
                f"data.path: its {what} than the data that the run was trained on, so the same number means "
                "something else; name that data"
            )


Box = tuple[tuple[float, float, float, float], str]
"""x1, y1, x2, y2 in pixels, and what is written at it."""


@dataclass(frozen=True)
class Picture:
    """One validation image, for ``python -m adaecho.show``.

    Attributes:
        image: uint8 [H, W, 3].
        title: what is written above it.
        true, predicted: boxes; None where the task has none.
    """

    image: Any
    title: str
    true: list[Box] | None = None
    predicted: list[Box] | None = None


@dataclass(frozen=True)
class Task:
    """A workload: data, model, loss and metrics.

    Attributes:
        metrics: every metric that ``evaluate`` reports, and which direction is better.
        source: training examples for ``EchoLoader``: indexable with a length, or an iterable. A checkpoint
            keeps the position that it tells as it is, secrets too.
        decode: bytes to arrays, deterministic; None where examples are stored decoded.
        augment: ``augment(example, rng)``, with ``augment.block(examples, keys)`` where it is vectorised.
        augment_parts: two, (once, each_time), that do as ``augment`` one after the other; ``echo.split=true``
            puts the echo between them. None where there are none.
        collate: None for ``EchoLoader``'s own.
        build_model: a freshly initialised model; torch's global generator is seeded by the caller.
        loss: of a batch on the model's device, as the sum over what counts and the number of what counts:
            so the mean over several micro-batches is exact, however unevenly they are filled.
        evaluate: ``evaluate(model, split, device=...)``, metrics of a model (already in eval mode, on that
            device) on a whole split, which it may hold in memory or read anew. One that also takes ``ranks=``
            (see ``adaecho.ranks``) may look at this rank's share alone; else every rank looks at all of it.
            The first rank's metrics count.
        has_test_split: whether there is one beside the validation split; it is read once, when a run ends.
        weight: the weight that ``loss`` will return, told from the batch alone. Without it the graphs of all
            micro-batches are kept until the weights are known. A plain number is of the batch's size alone,
            and so the same on every rank; what depends on its contents is a tensor.
        num_examples: in one epoch; by default the source's length. Only schedules in epochs ask for it.
        skipped_examples: bad ones that were left out when the task was built.
        files: that the examples, of all splits, come from: paths, or urls of tar shards. A checkpoint holds
            a digest of their names and sizes, and is not continued with others.
        fingerprint: what else a checkpoint can only be continued with, e.g. the hash of a tokenizer.
        facts: what is known of the data before training, for ``summary.json``.
        at_end: what to add to the summary of a run that ended by itself, e.g. a sample of generated text;
            names that a summary has already are left out.
        pictures: of a model (in eval mode, on a device), at most so many: for classifiers, of mistakes alone.
    """

    name: str
    metrics: dict[str, Direction]
    source: Any
    build_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], LossAndWeight]
    evaluate: Callable[..., dict[str, float]]
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
                    f"task {self.name}: metrics says {direction!r} of {metric}; say 'max' where more is "
                    "better, 'min' where less is"
                )

    @property
    def epoch_examples(self) -> int | None:
        """Examples of one epoch; None where neither the task nor its source tells."""
        source, fields = self.source, list[Any]()
        if isinstance(source, dict | tuple):
            fields = list(source.values() if isinstance(source, dict) else source)
        if fields and all(isinstance(one, np.ndarray | torch.Tensor) for one in fields):  # columns
            source = fields[0]
        if self.num_examples is None:
            with suppress(TypeError):  # of one that has no length, or can't know it
                return len(source)
        return self.num_examples

    def checked(self, metrics: Any) -> dict[str, float]:
        """What ``evaluate`` has returned.

        Raises:
            ConfigError: a metric is missing.
        """
        if not isinstance(metrics, Mapping) or self.metrics.keys() - metrics.keys():
            raise ConfigError(
                f"task {self.name}: evaluate returned {metrics!r:.200}; it returns {{metric: number}}, with "
                f"{', '.join(self.metrics)}"
            )
        return {
            name: value if isinstance(value, int | float) else float(value) for name, value in metrics.items()
        }
