"""What a configured task takes upstream, by stage, and for a step, before any training."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from adaecho.config.schema import Config
from adaecho.datasets.storage import storage_errors
from adaecho.echo import EchoLoader
from adaecho.headroom.advice import LEAST_RATIO, Loop, advice, first_factor
from adaecho.headroom.own_loop import num_bytes
from adaecho.tasks import build_task
from adaecho.tasks.base import Task
from adaecho.training.device import autocast, choose_device, choose_precision, synchronize
from adaecho.training.loader import upstream_arguments

BUDGET_S = 2.0  # for each measurement
_LEAST_BATCHES = 3


@dataclass(frozen=True)
class Headroom:
    """What was measured, in seconds per batch.

    Attributes:
        stages_s: what each upstream stage adds to those before it, in one thread.
        upstream_s: the whole of upstream, as the loader runs it.
        step_s: one training step.
        pass_bytes: of a pass of the batches; 0 where it isn't known.
    """

    stages_s: dict[str, float]
    upstream_s: float
    step_s: float
    pass_bytes: int = 0

    @property
    def ratio(self) -> float:
        """R = t_upstream / t_downstream (paper, section 2)."""
        return self.upstream_s / self.step_s

    def gain(self, factor: float) -> float:
        """How many times faster training gets at an echoing factor, if repeats were as good as fresh data.

        One fresh batch and its e steps take max(t_upstream, e * t_downstream) (paper, equation 1), and 1/e
        as many are needed.
        """
        before = max(self.upstream_s, self.step_s)
        return factor * before / max(self.upstream_s, factor * self.step_s)

    def report(self, name: str, batch_size: int, num_workers: int) -> Iterator[str]:
        """Line by line, with what to do about it."""
        yield f"{name}, batches of {batch_size}, num_workers={num_workers}"
        yield f"{'':24}{'examples/s':>12}{'ms/batch':>12}"
        rows = {f"{stage} alone": seconds for stage, seconds in self.stages_s.items()}
        rows |= {"upstream as it runs": self.upstream_s, "training step": self.step_s}
        for label, seconds in rows.items():
            rate = f"{batch_size / seconds:12.0f}" if seconds > 0 else f"{'-':>12}"
            yield f"{label:24}{rate}{1000 * seconds:12.2f}"
        yield f"R = t_upstream / t_downstream = {self.ratio:.2f}"
        if self.ratio < LEAST_RATIO:
            yield "Your input pipeline is not the bottleneck: echoing would not help."
            return
        for label, factor in (("2", 2.0), ("4", 4.0), ("R", self.ratio)):
            gain = self.gain(factor)
            yield f"at e = {label}: at best {gain:.2f} times as fast, were repeats as good as fresh examples"
        wait_s = self.upstream_s - self.step_s if num_workers else self.upstream_s
        yield from advice(Loop(wait_s, self.step_s, self.upstream_s, num_workers, self.pass_bytes))
        # Only what lies before the echo is spared.
        slowest = max(self.stages_s, key=lambda stage: self.stages_s[stage])
        variant = f"example_{'after' if slowest == 'augment' else 'before'}_augmentation"
        yield f"slowest stage: {slowest}; start with echo={variant} echo.factor={first_factor(self.ratio)}"


@storage_errors()
def measure(config: Config, budget_s: float = BUDGET_S, step_s: float | None = None) -> Headroom:
    """Measure a configured task.

    Args:
        config: task, data, batch size, workers and device are used.
        budget_s: seconds for each measurement.
        step_s: of one training step; None measures it.

    Raises:
        UserError: the task can't be built.
    """
    torch.set_num_threads(config.threads)
    task, device = build_task(config), choose_device(config)
    given = upstream_arguments(config, task, device)
    # The shuffle buffer only delays what is read: a batch's worth will do.
    with EchoLoader(**given, shuffle_buffer=config.batch_size) as loader:
        batches = iter(loader)
        batch = next(batches)
        # What threads have ready comes at once.
        ahead = given["prefetch"] if given["prefetch"] is not None else 2 * max(given["num_workers"], 1)
        upstream_s = time_call(lambda: next(batches), budget_s, warm_up=ahead + 2)
    pass_bytes = num_bytes(batch) * num_examples(given["source"]) // config.batch_size
    step_s = training_step_s(config, task, batch, device, budget_s) if step_s is None else step_s
    return Headroom(stages_s(given, budget_s), upstream_s, step_s, pass_bytes)


def num_examples(source: Any) -> int:
    """Of a source; 0 where it doesn't say."""
    source = next(iter(source.values())) if isinstance(source, dict) else source
    return len(source) if hasattr(source, "__len__") else 0


def stages_s(given: dict[str, Any], budget_s: float) -> dict[str, float]:
    """Seconds a batch that each stage adds, in one thread, on the processor."""
    # Examples that are still to be decoded, or of different sizes, make no batch but a list.
    raw = {"augment": None, **({"collate": list} if given["decode"] is not None else {})}
    stages: dict[str, dict[str, Any]] = {"read": {**raw, "decode": None}}
    if given["decode"] is not None:
        stages["decode"] = raw
    if given["augment"] is not None:
        stages["augment"] = {}
    alone = {**given, "num_workers": 0, "processes": False, "place": "decoded", "device": None}
    times, before_s = {}, 0.0
    for name, changes in stages.items():
        with EchoLoader(**{**alone, **changes}, shuffle_buffer=0) as loader:
            spent_s = time_call(iter(loader).__next__, budget_s)
        times[name], before_s = max(spent_s - before_s, 0.0), spent_s
    return times


def training_step_s(config: Config, task: Task, batch: Any, device: torch.device, budget_s: float) -> float:
    """Seconds of one step of SGD with momentum on a batch that is on the device."""
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
    """Mean seconds of a call within a budget, after some that don't count."""
    for _ in range(warm_up):
        call()
    start = time.perf_counter()
    for number in itertools.count(1):
        call()
        spent_s = time.perf_counter() - start
        if number >= _LEAST_BATCHES and spent_s >= budget_s:
            return spent_s / number
    raise AssertionError("not reached")
