"""What a workload is: data, augmentation, model, loss, metrics. A new one is one file and one YAML."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Direction = Literal["max", "min"]
Split = Literal["validation", "test"]


class Evaluate(Protocol):
    """Metrics of a model on one whole split."""

    def __call__(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]: ...


@dataclass(frozen=True)
class Task:
    """One workload, ready to train.

    Attributes:
        metrics: every metric that ``evaluate`` reports, and which direction is better.
        source: training examples for ``EchoLoader``: indexable with a length, or an iterable.
        decode: bytes to arrays, deterministic; None where examples are stored decoded.
        augment: ``augment(example, rng)``, with ``augment.block(examples, keys)`` where it is vectorised.
        collate: None for ``EchoLoader``'s own.
        build_model: a freshly initialised model; torch's global generator is seeded by the caller.
        loss: mean loss over a batch on the model's device, a scalar with gradient.
        evaluate: metrics of a model (already in eval mode, on ``device``) on a whole split; reads all of it.
        has_test_split: whether there is one beside the validation split; it is read once, when a run ends.
    """

    name: str
    metrics: dict[str, Direction]
    source: Any
    decode: Callable[[Any], Any] | None
    augment: Callable[..., Any] | None
    collate: Callable[[list[Any]], Any] | None
    build_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    evaluate: Evaluate
    has_test_split: bool = False
