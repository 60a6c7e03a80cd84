"""Which processor a run uses, in which number format, and a model on it: placed and measured."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import torch
from torch import nn

from adaecho.config.launch_env import launched_ranks, local_rank
from adaecho.config.schema import Config
from adaecho.errors import ConfigError
from adaecho.ranks import ALONE, Ranks
from adaecho.tasks.base import Split, Task


def choose_device(config: Config) -> torch.device:
    """The configured device; ``auto`` takes a GPU where there is one. Of several ranks each has its own.

    Raises:
        ConfigError: cuda is asked for and absent, or a host has fewer GPUs than ranks.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: no GPU is available; use device=cpu or device=auto")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if launched_ranks() == 1:
        return torch.device("cuda")
    number, there_are = local_rank(), torch.cuda.device_count()
    if number >= there_are:
        raise ConfigError(
            f"device={config.device}: rank {number} of this host has no GPU of its own, it has {there_are}; "
            f"start --nproc-per-node {there_are}, or set device=cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def choose_precision(config: Config, device: torch.device) -> str:
    """``float32`` or ``bfloat16``; ``auto`` takes bfloat16 where the processor computes it in hardware."""
    if config.precision != "auto":
        return config.precision
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if _cpu_computes_bfloat16() else "float32"


def _cpu_computes_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Context in which forward passes run in ``precision``."""
    if precision == "float32":
        return nullcontext()  # a disabled autocast takes as long as three small kernels
    return torch.autocast(device.type, dtype=torch.bfloat16)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next counts the work that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def place(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """The model on its device, in the memory format and compiled as the config says."""
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if config.compile != "off":
        model.compile(mode=None if config.compile == "default" else config.compile)
    return model


def measure(
    task: Task, model: nn.Module, split: Split, device: torch.device, precision: str, ranks: Ranks = ALONE
) -> dict[str, float]:
    """A model's metrics on a split; rank 0's on every rank. The model is left in eval mode."""
    model.eval()
    shared = {"ranks": ranks} if "ranks" in signature(task.evaluate).parameters else {}
    with autocast(device, precision), torch.inference_mode():
        metrics = task.checked(task.evaluate(model, split, device=device, **shared))
    return ranks.from_first(lambda: metrics)


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
