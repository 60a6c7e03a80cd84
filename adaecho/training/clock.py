"""Clocks that count only what they should and survive a restart."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from adaecho.training.device import synchronize


@dataclass
class Clocks:
    """Seconds of a run, in all its pieces.

    Attributes:
        train_time_s: steps and the wait for their batches, the first filling of the buffer included;
            evaluation, checkpoints and compilation excluded.
        eval_time_s: evaluation.
    """

    train_time_s: float = 0.0
    eval_time_s: float = 0.0

    def __post_init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        """Training time runs from now."""
        self._since = time.perf_counter()

    def stop(self, device: torch.device) -> None:
        """Training time stands still from the moment the device has done what was queued."""
        synchronize(device)
        self.peek()
        self._since = None

    def peek(self) -> float:
        """Training time up to now by the host's clock alone."""
        if self._since is not None:
            now = time.perf_counter()
            self.train_time_s += now - self._since
            self._since = now
        return self.train_time_s

    @contextmanager
    def evaluating(self, device: torch.device) -> Iterator[None]:
        """Count the block as evaluation time instead of training time."""
        self.stop(device)
        begin = time.perf_counter()
        try:
            yield
            synchronize(device)
        finally:
            self.eval_time_s += time.perf_counter() - begin
            self.start()

    @contextmanager
    def uncounted(self, device: torch.device) -> Iterator[None]:
        """Count the block, e.g. a checkpoint, as neither."""
        self.stop(device)
        try:
            yield
        finally:
            self.start()
