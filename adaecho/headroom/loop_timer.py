"""Measure how long a training loop waits for data:

from adaecho import headroom

with headroom.watch(loader) as watched:
    for batch in watched:
        train(batch)
# prints watched.report()
"""

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from adaecho.headroom.advice import Loop, advice

# A step that takes at least this many times the mean is not counted, because it contains an evaluation or a
# checkpoint.
_PAUSE = 10
_MIN_STALL = 0.05  # the report suggests no change if the loop waits for a smaller fraction of its time


class Watch:
    """A timer of a training loop, as returned by ``watch``. It measures the waiting time and the step time.

    In your own loop, iterate over the timer instead of the loader. It yields the loader's batches and has the
    loader's length and attributes. If a trainer runs the loop, call ``begin_step`` and ``end_step`` from the
    trainer's callbacks. Call ``resume`` after an evaluation, so that its time does not count.

    Attributes:
        batches: number of steps in the averages. They leave out the first step of each epoch, and steps that
            take at least ten times as long as the average.
    """

    def __init__(self, loader: Iterable[Any] | None = None) -> None:
        self._loader = loader
        self._asked: Any = None  # the time at which the loop asked for the batch
        self._given: Any = None  # the time at which the batch arrived
        # The times (asked, given, done) of steps that the GPU may not have finished.
        self._pending: deque[tuple[Any, Any, Any]] = deque()
        self.batches = 0
        self._wait_s = self._step_s = 0.0
        self._batch_bytes = 0

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            print(self.report())

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __iter__(self) -> Iterator[Any]:
        self._asked = None  # do not count the first batch of an epoch, which waits until workers have started
        for batch in () if self._loader is None else self._loader:
            self._batch_bytes = self._batch_bytes or num_bytes(batch)
            self.begin_step()
            yield batch
            self.end_step()

    def begin_step(self) -> None:
        """Record that the batch has arrived and that the step begins."""
        self._given = _now()

    def end_step(self) -> None:
        """Record that the step has ended or was queued on the GPU. The loop now waits for the next batch."""
        done = _now()
        if self._asked is not None:
            self._pending.append((self._asked, self._given, done))
        self._asked = done
        self._count(wait=False)

    def resume(self) -> None:
        """Restart the wait for the next batch, so that the time since ``end_step`` is not counted."""
        self._asked = _now()

    def _count(self, *, wait: bool) -> None:
        while self._pending:
            asked, given, done = self._pending[0]
            if not isinstance(done, float):
                if wait:
                    done.synchronize()
                elif not done.query():
                    return
            self._pending.popleft()
            # CUDA was initialized during this step, so its first and last times have different types.
            if type(asked) is not type(done):
                continue
            waited_s, step_s = _seconds(asked, given), _seconds(given, done)
            if self.batches < 3 or step_s < _PAUSE * self.step_s:
                self._wait_s, self._step_s = self._wait_s + waited_s, self._step_s + step_s
                self.batches += 1

    # Results

    @property
    def wait_s(self) -> float:
        """Mean seconds that a step waited for its batch; nan before the first counted step."""
        return self._wait_s / self.batches if self.batches else float("nan")

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, without the wait; nan before the first counted step."""
        return self._step_s / self.batches if self.batches else float("nan")

    @property
    def stall_fraction(self) -> float:
        """Fraction of the loop's time that was spent waiting for data, 0 to 1."""
        return self.wait_s / (self.wait_s + self.step_s)

    @property
    def workers(self) -> int | None:
        """Number of workers that load the data; 0 if the training loop's own thread loads it.

        This is the loader's ``num_workers``, or None if the loader does not have this attribute. If the
        loader's ``dataset`` is itself a loader with workers, this is the number of those workers. For
        example, it is 4 for ``EchoLoader(DataLoader(data, num_workers=4))``.
        """
        own = getattr(self._loader, "num_workers", None)
        inner = getattr(getattr(self._loader, "dataset", None), "num_workers", None)
        return inner if isinstance(inner, int) and inner else own

    @property
    def upstream_s(self) -> float:
        """Seconds that the loader needs to prepare a batch.

        Without workers, the loop waits while the loader prepares a batch, so this is ``wait_s``. Workers also
        prepare batches during the step, so with workers this is ``wait_s + step_s``. If the loop never waits,
        or if the number of workers is unknown, the result is only an upper bound.
        """
        return self.wait_s if self.workers == 0 else self.wait_s + self.step_s

    @property
    def R(self) -> float:  # noqa: N802 (the paper's letter)
        """R = t_upstream / t_downstream (paper, section 2). It is an upper bound if ``upstream_s`` is one."""
        return self.upstream_s / self.step_s

    def report(self) -> str:
        """Return a few lines of text: the time spent waiting, R, and what to try first."""
        self._count(wait=True)
        if not self.batches:
            return "headroom: no steps were counted (the first step of each epoch is skipped)"
        exact = self.workers == 0 or (self.workers and self.stall_fraction >= _MIN_STALL)
        lines = [
            f"headroom, {self.batches} steps: {1000 * self.wait_s:.2f} ms wait + "
            f"{1000 * self.step_s:.2f} ms step; {self.stall_fraction:.0%} of the time was spent waiting",
            f"R = {self.R:.2f}{'' if exact else ' at most'}: upstream takes {1000 * self.upstream_s:.2f} ms "
            f"per batch; without waiting the loop would be {1 + self.wait_s / self.step_s:.2f} times as fast",
        ]
        if self.stall_fraction < _MIN_STALL:
            return "\n".join([*lines, "The loop hardly waits for data. Nothing to do."])
        try:
            epoch_bytes = self._batch_bytes * len(self)
        except TypeError:  # a loader without a length
            epoch_bytes = 0
        factor = float(getattr(self._loader, "factor", 1.0))
        found = Loop(self.wait_s, self.step_s, self.upstream_s, self.workers, epoch_bytes, factor)
        return "\n".join(lines + advice(found))


def watch(loader: Iterable[Any]) -> Watch:
    """Measure how long a training loop waits for data and how long a step takes, and suggest improvements.

    Iterate over the result instead of ``loader``. It yields the same batches in the same order. Call
    ``report()`` at any time; at the end of a ``with`` block the report is printed. Measuring does not make
    the loop wait for the GPU.

    Args:
        loader: any iterable of batches.
    """
    return Watch(loader)


def _now() -> Any:
    """Return the time in seconds, or a CUDA event if CUDA is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return time.perf_counter()
    # Waiting costs nothing while the GPU has queued steps. Only events show when the GPU is idle.
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000)


def num_bytes(batch: Any) -> int:
    """Return the number of bytes of all arrays and tensors in a batch, which may be nested."""
    if isinstance(batch, dict | list | tuple):
        return sum(map(num_bytes, batch.values() if isinstance(batch, dict) else batch))
    return int(getattr(batch, "nbytes", 0))
