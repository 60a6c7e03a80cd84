"""Choose the device and precision of a run, evaluate its model, and measure its times."""

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
from adaecho.ranks import SINGLE_PROCESS, DistributedContext
from adaecho.tasks.base import Split, Task


def choose_device(config: Config) -> torch.device:
    """Return the configured device. ``device=auto`` selects a GPU for each rank, if one is available."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: no GPU is available; use device=cpu or device=auto")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if launched_ranks() == 1:
        return torch.device("cuda")
    number, count = local_rank(), torch.cuda.device_count()
    if number >= count:
        raise ConfigError(
            f"device={config.device}: rank {number} of this host has no GPU, because the host has {count}; "
            f"start --nproc-per-node {count}, or set device=cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def choose_precision(config: Config, device: torch.device) -> str:
    """Return "float32" or "bfloat16". ``precision=auto`` selects bfloat16 if the hardware supports it."""
    if config.precision != "auto":
        return config.precision
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if _cpu_computes_bfloat16() else "float32"


def _cpu_computes_bfloat16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return a context in which forward passes are computed in ``precision``."""
    if precision == "float32":
        return nullcontext()  # even a disabled autocast would take as long as three small kernels
    return torch.autocast(device.type, dtype=torch.bfloat16)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def place(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Move a model to its device, and apply the configured memory format and compilation."""
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if config.compile != "off":
        model.compile(mode=None if config.compile == "default" else config.compile)
    return model


def measure(
    task: Task,
    model: nn.Module,
    split: Split,
    device: torch.device,
    precision: str,
    ranks: DistributedContext = SINGLE_PROCESS,
) -> dict[str, float]:
    """Evaluate a model on a split, and leave it in eval mode. All ranks return rank 0's metrics."""
    model.eval()
    shared = {"ranks": ranks} if "ranks" in signature(task.evaluate).parameters else {}
    with autocast(device, precision), torch.inference_mode():
        metrics = task.checked(task.evaluate(model, split, device=device, **shared))
    return ranks.from_first(lambda: metrics)


@dataclass
class Clocks:
    """The timers of a run, in seconds. A resumed run continues them.

    Attributes:
        train_time_s: time spent on training steps and waiting for batches, but not on evaluation, checkpoints
            or compilation.
        eval_time_s: time spent on evaluation.
    """

    train_time_s: float = 0.0
    eval_time_s: float = 0.0

    def __post_init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        """Start counting training time."""
        self._since = time.perf_counter()

    def stop(self, device: torch.device) -> None:
        """Stop counting training time, after the device has finished its queued work."""
        synchronize(device)
        self.peek()
        self._since = None

    def peek(self) -> float:
        """Return the training time so far, without waiting for the device."""
        if self._since is not None:
            now = time.perf_counter()
            self.train_time_s += now - self._since
            self._since = now
        return self.train_time_s

    @contextmanager
    def evaluating(self, device: torch.device) -> Iterator[None]:
        """Count the time of the ``with`` block as evaluation time."""
        with self.uncounted(device):
            begin = time.perf_counter()
            yield
            synchronize(device)
            self.eval_time_s += time.perf_counter() - begin

    @contextmanager
    def uncounted(self, device: torch.device) -> Iterator[None]:
        """Count the time of the ``with`` block neither as training time nor as evaluation time."""
        self.stop(device)
        try:
            yield
        finally:
            self.start()
