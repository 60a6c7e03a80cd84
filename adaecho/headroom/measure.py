"""Would echoing help? ``python -m adaecho.headroom`` measures before any training.

    python -m adaecho.headroom task=cifar10 data.path=...       # arguments as for python -m adaecho.run
    python -m adaecho.headroom images=... [step_s=0.05]         # photographs, see images

It times each upstream stage alone, the whole of upstream as ``EchoLoader`` runs it, and the training step
on a batch that is already on the device. ``step_s=`` states the seconds of your own step instead.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import nn

from adaecho.config.bounds import one_of
from adaecho.config.schema import DEVICES, Config
from adaecho.datasets.labelled_images import find_images
from adaecho.datasets.storage import storage_errors
from adaecho.echo import EchoLoader
from adaecho.echo.batch.augment import augmentations, in_turn
from adaecho.errors import ConfigError, DataError, with_notes
from adaecho.headroom.advice import (
    LEAST_RATIO,
    Loop,
    before_echoing,
    cores,
    cores_kept_busy,
    cpu_s,
    first_factor,
    num_bytes,
)
from adaecho.tasks import build_task
from adaecho.training.device import autocast, choose_device, choose_precision, synchronize
from adaecho.training.loader import upstream_arguments

BUDGET_S = 2.0  # for each measurement
_LEAST_BATCHES = 3


@dataclass(frozen=True)
class Headroom:
    """What was measured, in seconds per batch.

    Attributes:
        stages_s: each upstream stage alone, in one thread.
        upstream_s: the whole of upstream, as the loader runs it.
        step_s: one training step.
        busy: cores that upstream kept busy; None where it isn't known.
        pass_bytes: of a pass of the batches; 0 where it isn't known.
    """

    stages_s: dict[str, float]
    upstream_s: float
    step_s: float
    busy: float | None = None
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

    def before_echoing(self, num_workers: int) -> list[str]:
        """What to try before echoing, in this order."""
        wait_s = max(self.upstream_s - self.step_s, 0.0) if num_workers else self.upstream_s
        return before_echoing(
            Loop(
                wait_s, self.step_s, self.upstream_s, self.step_s, num_workers, True, self.busy, cores(),
                self.pass_bytes, 1, 1.0,
            )
        )  # fmt: skip

    def advice(self) -> str:
        """What echoing would do, as one plain sentence."""
        if self.ratio < LEAST_RATIO:
            return "Your input pipeline is not the bottleneck: echoing would not help."
        slowest = max(self.stages_s, key=lambda name: self.stages_s[name])
        # Only what lies before the echo is spared.
        variant = f"example_{'after' if slowest == 'augment' else 'before'}_augmentation"
        if self.ratio < 1.5:
            return (
                f"Your input pipeline is a little slower than the step (R = {self.ratio:.2f}): "
                f"try more workers or a faster '{slowest}' stage before echoing."
            )
        return (
            f"Your accelerator waits for data (R = {self.ratio:.1f}, slowest stage '{slowest}'): echoing "
            f"with a factor up to {self.ratio:.1f} costs no time; start with "
            f"echo={variant} echo.factor={first_factor(self.ratio)}, and more workers if cores are idle."
        )


@dataclass(frozen=True)
class Upstream:
    """What comes before the step: the arguments of an ``EchoLoader`` but for those of echo and buffer."""

    arguments: dict[str, Any]

    def loader(self, **changes: Any) -> EchoLoader:
        """Upstream without echo. The shuffle buffer only delays what is read: a batch's worth will do."""
        batch = self.arguments["batch_size"]
        buffer = min(batch, self._num_examples or batch)
        return EchoLoader(**{**self.arguments, "shuffle_buffer": buffer, **changes})

    @property
    def _num_examples(self) -> int:
        """Examples of the source; 0 where it doesn't say."""
        source = self.arguments["source"]
        return len(source) if hasattr(source, "__len__") and not isinstance(source, dict | tuple) else 0

    def measured(self, budget_s: float, step_s: Callable[[Any], float]) -> Headroom:
        """The whole as it runs, each stage, and ``step_s`` of a batch."""
        with self.loader() as loader:
            batches = iter(loader)
            batch = next(batches)
            before_s, begin = cpu_s(), time.perf_counter()
            batch_s = time_call(lambda: next(batches), budget_s, warm_up=self._ahead + 2)
            busy = cores_kept_busy(before_s, time.perf_counter() - begin)
        pass_bytes = num_bytes(batch) * self._num_examples // self.arguments["batch_size"]
        return Headroom(self.stages_s(budget_s), batch_s, step_s(batch), busy, pass_bytes)

    @property
    def _ahead(self) -> int:
        """Batches that threads may have ready."""
        prefetch: int | None = self.arguments.get("prefetch")
        return 2 * max(self.arguments["num_workers"], 1) if prefetch is None else prefetch

    def stages_s(self, budget_s: float) -> dict[str, float]:
        """Each stage's own time per batch, in one thread."""
        encoded = self.arguments.get("decode") is not None
        return self._of_encoded_s(budget_s) if encoded else self._of_arrays_s(budget_s)

    def _of_arrays_s(self, budget_s: float) -> dict[str, float]:
        """What augmenting adds to reading: both work on many small examples at once."""
        stages: dict[str, Any] = {"read": None, "augment": self.arguments.get("augment")}
        times, before_s = {}, 0.0
        for name, augment in stages.items():
            with self.loader(augment=augment, num_workers=0, shuffle_buffer=0) as loader:
                spent_s = time_call(iter(loader).__next__, budget_s)
            times[name] = max(spent_s - before_s, 0.0)
            before_s = spent_s
        return times

    def _of_encoded_s(self, budget_s: float) -> dict[str, float]:
        """Each stage on the results of the one before."""
        changes: dict[str, Any] = {
            "decode": None, "augment": None, "collate": list, "place": "decoded", "device": None,
        }  # fmt: skip
        with self.loader(**changes, num_workers=0, shuffle_buffer=0) as loader:
            times = {"read": time_call(iter(loader).__next__, budget_s)}
            encoded = next(iter(loader))
        decoded = self._decoded(encoded)
        times["decode"] = time_call(lambda: self._decoded(encoded), budget_s)
        given = self.arguments.get("augment")
        augment = in_turn(augmentations(given, 0, "example {}".format))
        if augment is not None:
            items = np.arange(len(decoded), dtype=np.int64)
            times["augment"] = time_call(lambda: augment(items, decoded), budget_s)
        return times

    def _decoded(self, encoded: list[Any]) -> list[Any]:
        """The examples that can be decoded; the others were counted while the whole was measured."""
        decoded = []
        for example in encoded:
            with contextlib.suppress(ValueError):
                decoded.append(self.arguments["decode"](example))
        return decoded


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
    upstream = Upstream(upstream_arguments(config, task, device))

    def timed_s(batch: Any) -> float:
        model = task.build_model().to(device)
        return sgd_step_s(model, lambda: task.loss(model, batch), choose_precision(config, device), budget_s)

    return upstream.measured(budget_s, timed_s if step_s is None else lambda _: step_s)


def sgd_step_s(model: nn.Module, loss: Callable[[], Any], precision: str, budget_s: float) -> float:
    """Seconds of one step of SGD with momentum on a resident batch, whose loss is as a ``Task``'s."""
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with autocast(device, precision):
            total, weight = loss()
        (total / weight).backward()
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


def report(name: str, batch_size: int, num_workers: int, found: Headroom) -> Iterator[str]:
    """What was measured, line by line."""
    yield f"{name}, batches of {batch_size}, num_workers={num_workers}"
    yield f"{'':24}{'examples/s':>12}{'ms/batch':>12}"
    rows = {f"{name} alone": seconds for name, seconds in found.stages_s.items()}
    rows |= {"upstream as it runs": found.upstream_s, "training step": found.step_s}
    for name, seconds in rows.items():
        rate = f"{batch_size / seconds:12.0f}" if seconds > 0 else f"{'-':>12}"
        yield f"{name:24}{rate}{1000 * seconds:12.2f}"
    yield f"R = t_upstream / t_downstream = {found.ratio:.2f}"
    if found.ratio < LEAST_RATIO:
        yield found.advice()
        return
    for label, factor in (("2", 2.0), ("4", 4.0), ("R", max(found.ratio, 1.0))):
        gain = found.gain(factor)
        yield f"at e = {label}: at best {gain:.2f} times as fast, where repeats are as good as fresh examples"
    yield from found.before_echoing(num_workers)
    yield found.advice()


_JITTER = 0.4


@dataclass(frozen=True)
class ImageArguments:
    """The arguments beside ``step_s=``; photographs get ImageNet's augmentation, without a task."""

    images: str  # a folder of images, or parquet with a column image
    batch_size: int = 64
    num_workers: int = os.cpu_count() or 1
    size: int = 224
    max_bad_examples: int = 0
    device: str = "auto"


def parse(arguments: list[str]) -> ImageArguments:
    """Read the arguments.

    Raises:
        ConfigError: one is unknown or out of range.
    """
    known = {field.name: field.type for field in fields(ImageArguments)}
    values: dict[str, Any] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in known:
            raise ConfigError(f"{argument}: with images= there are only {', '.join([*known, 'step_s'])}")
        values[name] = value if known[name] is str else _whole(name, value)
    given = ImageArguments(**values)
    one_of("device", given.device, DEVICES)
    return given


def _whole(name: str, value: str) -> int:
    least = 1 if name in ("batch_size", "size") else 0
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"{name}={value}: must be a whole number, at least {least}")
    return int(value)


@storage_errors()
def measure_images(arguments: list[str], budget_s: float, step_s: float | None) -> Iterator[str]:
    """Measure, and tell line by line.

    Raises:
        UserError: an argument can't be, or more images are damaged than ``max_bad_examples`` allows.
    """
    from adaecho.transforms.photographs import DecodeImage, RandomResizedCrop

    given = parse(arguments)
    augment = RandomResizedCrop(given.size, brightness=_JITTER, contrast=_JITTER, saturation=_JITTER)
    upstream = Upstream({
        "source": find_images(given.images), "decode": DecodeImage(), "augment": augment,
        "batch_size": given.batch_size, "num_workers": given.num_workers,
        "max_bad_examples": given.max_bad_examples,
    })  # fmt: skip

    def timed_s(batch: Any) -> float:
        return _resnet50_step_s(batch["image"], given.device, budget_s) if step_s is None else step_s

    try:
        found = upstream.measured(budget_s, timed_s)
    except ValueError as error:  # an image that can't be decoded; the notes say which
        raise DataError(with_notes(error).replace("\n", "; ")) from error
    return report(given.images, given.batch_size, given.num_workers, found)


def _resnet50_step_s(images: torch.Tensor, device: str, budget_s: float) -> float:
    """Seconds of one SGD step of ResNet-50 on a resident batch, in bfloat16 on a GPU."""
    from torchvision.models import resnet50

    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    where = torch.device("cuda" if cuda else "cpu")
    model = resnet50().to(where, memory_format=torch.channels_last)
    pixels = images.to(where).permute(0, 3, 1, 2).float() / 255
    labels = torch.zeros(len(images), dtype=torch.int64, device=where)

    def loss() -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(model(pixels), labels), 1

    return sgd_step_s(model, loss, "bfloat16" if cuda else "float32", budget_s)
