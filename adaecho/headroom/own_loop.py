"""Headroom in one's own loop: what is lost to waiting for data, and what to try against it.

from adaecho import headroom

with headroom.watch(loader) as seen:
    for batch in seen:
        train(batch)
# prints seen.report()
"""

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from adaecho.headroom.advice import Loop, advice

_PAUSE = 10  # a step of so many mean steps is an evaluation or a checkpoint
_LEAST = 0.05  # of the time lost to waiting: less is not worth a change


class Watch:
    """Measures waits and steps of a training loop; see ``watch``.

    A trainer's callback calls ``begin_step`` and ``end_step`` around each step instead of iterating, and
    ``resume`` where something else came in between (an evaluation).

    Attributes:
        batches: counted steps.
    """

    def __init__(self, loader: Iterable[Any] | None = None) -> None:
        self._loader = loader
        self._ready: Any = None  # since when the loop has been asking for a batch
        self._given: Any = None
        self._pending: deque[tuple[Any, Any, Any]] = deque()  # steps that the GPU has not come to yet
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

    def __iter__(self) -> Iterator[Any]:
        self._ready = None  # the first batch of a pass waits for workers that begin
        for batch in () if self._loader is None else self._loader:
            self._batch_bytes = self._batch_bytes or num_bytes(batch)
            self.begin_step()
            yield batch
            self.end_step()

    def begin_step(self) -> None:
        """A batch is there, and its step begins."""
        self._given = _now()

    def end_step(self) -> None:
        """The step has been taken (or queued on the GPU); what follows is the wait for the next batch."""
        done = _now()
        if self._ready is not None:
            self._pending.append((self._ready, self._given, done))
        self._ready = done
        self._count(wait=False)

    def resume(self) -> None:
        """The wait begins only now: what came since ``end_step`` was no wait for data."""
        self._ready = _now()

    def _count(self, *, wait: bool) -> None:
        while self._pending:
            ready, given, done = self._pending[0]
            if not isinstance(done, float):
                if wait:
                    done.synchronize()
                elif not done.query():
                    return
            self._pending.popleft()
            if type(ready) is not type(done):  # CUDA came into use in this step
                continue
            waited_s, step_s = _seconds(ready, given), _seconds(given, done)
            if self.batches < 3 or step_s < _PAUSE * self.step_s:
                self._wait_s, self._step_s = self._wait_s + waited_s, self._step_s + step_s
                self.batches += 1

    # What was found

    @property
    def wait_s(self) -> float:
        """Mean seconds that a step waited for its batch; nan before any."""
        return self._wait_s / self.batches if self.batches else float("nan")

    @property
    def step_s(self) -> float:
        """Mean seconds of a step; nan before any."""
        return self._step_s / self.batches if self.batches else float("nan")

    @property
    def lost(self) -> float:
        """Share of the loop's time that went into waiting, 0 to 1."""
        return self.wait_s / (self.wait_s + self.step_s)

    @property
    def workers(self) -> int | None:
        """Of the loader, or of the one in it; 0: the loop's thread reads, None: it doesn't tell."""
        own = getattr(self._loader, "num_workers", None)
        inner = getattr(getattr(self._loader, "dataset", None), "num_workers", None)
        return inner if isinstance(inner, int) and inner else own

    @property
    def upstream_s(self) -> float:
        """Seconds the loader takes for a batch; at most so many where workers read and the loop never waits.

        A loop that waits for workers is as slow as they are.
        """
        return self.wait_s if self.workers == 0 else self.wait_s + self.step_s

    @property
    def R(self) -> float:  # noqa: N802 (the paper's letter)
        """t_upstream / t_downstream (paper, section 2); ``upstream_s`` says when it is an upper bound."""
        return self.upstream_s / self.step_s

    def report(self) -> str:
        """A few lines: time lost, R, and what to try first."""
        self._count(wait=True)
        if not self.batches:
            return "headroom: no step was counted yet (the first of each pass is not)"
        exact = self.workers == 0 or (self.workers and self.lost >= _LEAST)
        lines = [
            f"headroom, {self.batches} steps: {1000 * self.wait_s:.2f} ms of waiting and "
            f"{1000 * self.step_s:.2f} ms of step for each; {self.lost:.0%} of the time was lost to waiting",
            f"R = {self.R:.2f}{'' if exact else ' at most'}: upstream {1000 * self.upstream_s:.2f} ms a "
            f"batch; never waiting would be {1 + self.wait_s / self.step_s:.2f} times as fast",
        ]
        if self.lost < _LEAST:
            return "\n".join([*lines, "The loop hardly waits for data: nothing to do."])
        try:
            pass_bytes = self._batch_bytes * len(self)
        except TypeError:  # a loader without a length
            pass_bytes = 0
        echoed = float(self._loader.factor) if _is_ours(self._loader) else 1.0  # type: ignore[union-attr]
        found = Loop(self.wait_s, self.step_s, self.upstream_s, self.workers, pass_bytes, echoed)
        return "\n".join(lines + advice(found))


def watch(loader: Iterable[Any]) -> Watch:
    """Watch a training loop: how long it waits for data, how long a step takes, and what would help.

    Iterate over the result in place of ``loader``: the same batches in the same order, nothing read ahead or
    kept. ``report()`` tells what was found at any time, and is printed where a ``with`` ends. On a GPU the
    times are those of events in its stream: nothing in the loop waits for it.

    Args:
        loader: any iterable of batches.
    """
    return Watch(loader)


def _is_ours(loader: Any) -> bool:
    return type(loader).__module__.startswith("adaecho.echo")


def _now() -> Any:
    """The processor's time; where CUDA is in use, an event in its stream.

    The loop runs ahead of the GPU, so that its waits cost nothing until the GPU has caught up: between the
    event after a step and the one before the next the GPU has nothing to do.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000)


def num_bytes(batch: Any) -> int:
    """Of the arrays and tensors in a batch."""
    if isinstance(batch, dict | list | tuple):
        return sum(map(num_bytes, batch.values() if isinstance(batch, dict) else batch))
    return int(getattr(batch, "nbytes", 0))
