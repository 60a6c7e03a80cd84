"""Would echoing help? ``python -m adaecho.headroom task=... [data.path=...]`` measures before any training.

It times each upstream stage alone, the whole of upstream as ``EchoLoader`` runs it, and the training step
on a batch that is already on the device. The arguments are those of ``python -m adaecho.run``.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from adaecho import config as schema
from adaecho.config import Config
from adaecho.echo import EchoLoader
from adaecho.errors import UserError
from adaecho.tasks import build_task
from adaecho.tasks.base import Task

_BUDGET_S = 2.0  # for each measurement
_LEAST_BATCHES = 3


@dataclass(frozen=True)
class Headroom:
    """What was measured, in seconds per batch.

    Attributes:
        stages_s: each upstream stage alone, in one thread.
        upstream_s: the whole of upstream, as the loader runs it.
        step_s: one training step.
    """

    stages_s: dict[str, float]
    upstream_s: float
    step_s: float

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

    def advice(self) -> str:
        """One plain sentence."""
        if self.ratio < 1.05:
            return "Your input pipeline is not the bottleneck: echoing would not help."
        slowest = max(self.stages_s, key=lambda name: self.stages_s[name])
        if self.ratio < 1.5:
            return (
                f"Your input pipeline is a little slower than the step (R = {self.ratio:.2f}): "
                f"try more workers or a faster '{slowest}' stage before echoing."
            )
        return (
            f"Your accelerator waits for data (R = {self.ratio:.1f}, slowest stage '{slowest}'): echoing "
            f"with a factor up to {self.ratio:.1f} costs no time; start with "
            f"echo=example_before_augmentation echo.factor={min(round(self.ratio), 4)}, and more workers if "
            "cores are idle."
        )


def measure(config: Config, budget_s: float = _BUDGET_S) -> Headroom:
    """Measure a configured task.

    Args:
        config: task, data, batch size, workers and device are used.
        budget_s: seconds for each measurement.

    Raises:
        UserError: the task can't be built.
    """
    torch.set_num_threads(config.threads)
    task = build_task(config)
    with _loader(config, task) as loader:
        batches = iter(loader)
        batch = next(batches)
        upstream_s = _time(lambda: next(batches), budget_s, warm_up=config.data.prefetch + 2)
    return Headroom(_stages(config, task, budget_s), upstream_s, _step(config, task, batch, budget_s))


def _loader(config: Config, task: Task, **changes: Any) -> EchoLoader:
    """Upstream without echo. The shuffle buffer only delays what is read: a batch's worth will do."""
    arguments: dict[str, Any] = {
        "decode": task.decode,
        "augment": task.augment,
        "collate": task.collate,
        "num_workers": config.data.num_workers,
        "prefetch": config.data.prefetch,
        "max_bad_examples": config.data.max_bad_examples,
        "shuffle_buffer": config.batch_size,
    }
    return EchoLoader(task.source, config.batch_size, **{**arguments, **changes})


def _stages(config: Config, task: Task, budget_s: float) -> dict[str, float]:
    """Each stage's own time: what it adds to a pipeline of the stages before it, inline."""
    chain: dict[str, Any] = {"decode": None, "augment": None, "num_workers": 0, "shuffle_buffer": 0}
    # Stored examples that are still to be decoded may have no common shape to stack.
    chain["collate"] = task.collate if task.decode is None else len
    chains = {"read": dict(chain)}
    for name, stage in (("decode", task.decode), ("augment", task.augment)):
        if stage is not None:
            chain[name] = stage
            chains[name] = dict(chain)
    if task.decode is not None:
        chains["batch"] = {**chain, "collate": task.collate}
    times, before_s = {}, 0.0
    for name, changes in chains.items():
        with _loader(config, task, **changes) as loader:
            batches = iter(loader)
            spent_s = _time(lambda batches=batches: next(batches), budget_s)  # type: ignore[misc]
        times[name] = max(spent_s - before_s, 0.0)
        before_s = max(spent_s, before_s)
    return times


def _step(config: Config, task: Task, batch: Any, budget_s: float) -> float:
    """Seconds of one SGD step on a resident batch."""
    from adaecho.training.device import autocast, choose_device, choose_precision, synchronize

    device = choose_device(config)
    precision = choose_precision(config, device)
    model = task.build_model().to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=config.optimizer.momentum)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}

    def step() -> None:
        optimizer.zero_grad()
        with autocast(device, precision):
            loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        synchronize(device)

    return _time(step, budget_s)


def _time(call: Callable[[], Any], budget_s: float, warm_up: int = 1) -> float:
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


def report(config: Config, found: Headroom) -> Iterator[str]:
    """What was measured, line by line."""
    size, workers = config.batch_size, config.data.num_workers
    yield f"{config.task.name}, batches of {size}, data.num_workers={workers}"
    yield f"{'':24}{'examples/s':>12}{'ms/batch':>12}"
    rows = {f"{name} alone": seconds for name, seconds in found.stages_s.items()}
    rows |= {"upstream as it runs": found.upstream_s, "training step": found.step_s}
    for name, seconds in rows.items():
        rate = f"{size / seconds:12.0f}" if seconds > 0 else f"{'-':>12}"
        yield f"{name:24}{rate}{1000 * seconds:12.2f}"
    yield f"R = t_upstream / t_downstream = {found.ratio:.2f}"
    for label, factor in (("2", 2.0), ("4", 4.0), ("R", max(found.ratio, 1.0))):
        gain = found.gain(factor)
        yield f"at e = {label}: at best {gain:.2f} times as fast, where repeats are as good as fresh examples"
    yield found.advice()


def main(overrides: list[str], budget_s: float = _BUDGET_S) -> None:
    """Compose, measure, print."""
    from adaecho.run import CONF

    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = schema.from_plain(schema.to_plain(compose("config", overrides=overrides)))
    for line in report(config, measure(config, budget_s)):
        print(line, flush=True)


def cli() -> None:
    """``main`` with one message for what the user can mend."""
    try:
        main(sys.argv[1:])
    except (UserError, HydraException) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    cli()
