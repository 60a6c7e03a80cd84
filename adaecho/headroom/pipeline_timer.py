"""Measure the time of the input pipeline and of the training step for a configured task."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from adaecho.config.schema import Config
from adaecho.datasets.storage import storage_errors
from adaecho.echo import EchoLoader
from adaecho.headroom.advice import MIN_RATIO, Loop, advice, first_factor
from adaecho.headroom.loop_timer import num_bytes
from adaecho.tasks import build_task
from adaecho.tasks.base import Task
from adaecho.training.device import autocast, choose_device, choose_precision, synchronize
from adaecho.training.loader import upstream_arguments

BUDGET_S = 2.0  # duration of each measurement
_MIN_CALLS = 3


@dataclass(frozen=True)
class Headroom:
    """The measured times of a task's input pipeline and training step, in seconds per batch."""

    stages_s: dict[str, float]  # for each stage of the input pipeline: the time that it adds in one thread
    upstream_s: float  # the whole input pipeline, as the loader runs it, with its workers
    step_s: float  # the training step
    epoch_bytes: int = 0  # bytes of all batches of an epoch; 0 if unknown

    @property
    def ratio(self) -> float:
        """R, the loading time divided by the time of a training step (paper, section 2)."""
        return self.upstream_s / self.step_s

    def gain(self, factor: float) -> float:
        """Return how much faster training gets at best if each example is used ``factor`` times."""
        # At best, repeats are as useful as fresh examples. With echoing factor e, the time of e steps is
        # max(t_upstream, e * t_downstream) (paper, equation 1). Without echoing, it is
        # e * max(t_upstream, t_downstream).
        before = max(self.upstream_s, self.step_s)
        return factor * before / max(self.upstream_s, factor * self.step_s)

    def report(self, name: str, batch_size: int, num_workers: int) -> Iterator[str]:
        """Yield lines of text: the measured times, the speed-up that echoing could give, and advice."""
        yield f"{name}, batches of {batch_size}, num_workers={num_workers}"
        yield f"{'':24}{'examples/s':>12}{'ms/batch':>12}"
        rows = {f"{stage} alone": seconds for stage, seconds in self.stages_s.items()}
        rows |= {"upstream as it runs": self.upstream_s, "training step": self.step_s}
        for label, seconds in rows.items():
            rate = f"{batch_size / seconds:12.0f}" if seconds > 0 else f"{'-':>12}"
            yield f"{label:24}{rate}{1000 * seconds:12.2f}"
        yield f"R = t_upstream / t_downstream = {self.ratio:.2f}"
        if self.ratio < MIN_RATIO:
            yield "The input pipeline is not the bottleneck, so echoing would not help."
            return
        for label, factor in (("2", 2.0), ("4", 4.0), ("R", self.ratio)):
            gain = self.gain(factor)
            yield f"e = {label}: at best {gain:.2f} times as fast, if repeats were as good as fresh examples"
        wait_s = self.upstream_s - self.step_s if num_workers else self.upstream_s
        yield from advice(Loop(wait_s, self.step_s, self.upstream_s, num_workers, self.epoch_bytes))
        # Echoing saves only the work of the stages before it, so it should follow the slowest stage.
        slowest = max(self.stages_s, key=lambda stage: self.stages_s[stage])
        variant = f"example_{'after' if slowest == 'augment' else 'before'}_augmentation"
        yield f"slowest stage: {slowest}; start with echo={variant} echo.factor={first_factor(self.ratio)}"


@storage_errors()
def measure(config: Config, budget_s: float = BUDGET_S, step_s: float | None = None) -> Headroom:
    """Measure how long a task takes to prepare a batch and to train on it."""
    # Each measurement takes about budget_s. If step_s is given, it replaces the measured training step.
    torch.set_num_threads(config.threads)
    task, device = build_task(config), choose_device(config)
    given = upstream_arguments(config, task, device)
    # A buffer of one batch suffices, because the size of the shuffle buffer does not change the rate.
    with EchoLoader(**given, shuffle_buffer=config.batch_size) as loader:
        batches = iter(loader)
        batch = next(batches)
        # Discard the batches that the workers have prefetched, which would bias the mean.
        ahead = given["prefetch"] if given["prefetch"] is not None else 2 * max(given["num_workers"], 1)
        upstream_s = time_call(lambda: next(batches), budget_s, warm_up=ahead + 2)
    epoch_bytes = num_bytes(batch) * num_examples(given["source"]) // config.batch_size
    step_s = training_step_s(config, task, batch, device, budget_s) if step_s is None else step_s
    return Headroom(stages_s(given, budget_s), upstream_s, step_s, epoch_bytes)


def num_examples(source: Any) -> int:
    """Return the number of examples of a source, or 0 if the source has no length."""
    source = next(iter(source.values())) if isinstance(source, dict) else source
    return len(source) if hasattr(source, "__len__") else 0


def stages_s(given: dict[str, Any], budget_s: float) -> dict[str, float]:
    """Return the seconds per batch that each stage adds, measured in a single thread on the CPU."""
    # Collate to a list, because encoded examples and images of different sizes cannot be stacked.
    raw = {"augment": None, **({"collate": list} if given["decode"] is not None else {})}
    stages: dict[str, dict[str, Any]] = {"read": {**raw, "decode": None}}
    if given["decode"] is not None:
        stages["decode"] = raw
    if given["augment"] is not None:
        stages["augment"] = {}
    alone = {**given, "num_workers": 0, "processes": False, "buffer_format": "decoded", "device": None}
    times, before_s = {}, 0.0
    for name, changes in stages.items():
        with EchoLoader(**{**alone, **changes}, shuffle_buffer=0) as loader:
            spent_s = time_call(iter(loader).__next__, budget_s)
        times[name], before_s = max(spent_s - before_s, 0.0), spent_s
    return times


def training_step_s(config: Config, task: Task, batch: Any, device: torch.device, budget_s: float) -> float:
    """Return the seconds of one SGD step on a batch that is already on the device."""
    model = task.build_model().to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    precision = choose_precision(config, device)

    def step() -> None:
        optimizer.zero_grad()
        with autocast(device, precision):
            total, weight = task.loss(model, batch)
        loss: Any = total / weight
        loss.backward()
        optimizer.step()
        synchronize(device)

    return time_call(step, budget_s)


def time_call(call: Callable[[], Any], budget_s: float, warm_up: int = 1) -> float:
    """Return the mean seconds of a call, measured for about ``budget_s`` seconds after ``warm_up`` calls."""
    for _ in range(warm_up):
        call()
    calls, spent_s, start = 0, 0.0, time.perf_counter()
    while calls < _MIN_CALLS or spent_s < budget_s:
        call()
        calls, spent_s = calls + 1, time.perf_counter() - start
    return spent_s / calls
