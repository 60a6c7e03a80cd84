"""Headroom in one's own loop: what is lost to waiting for data, and what to try against it.

from adaecho import headroom

with headroom.watch(loader) as seen:
    for batch in seen:
        train(batch)
# prints seen.report()
"""

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import TracebackType
from typing import Any

from adaecho.headroom.advice import (
    LEAST_RATIO,
    Loop,
    cores,
    cores_kept_busy,
    cpu_s,
    expected,
    num_bytes,
    steps,
)

PROBE_AFTER = 5  # batches: the first ones of a loop are slower (kernels chosen, caches cold)
LONGEST_PROBE_S = 5.0
_PAUSE = 10  # a step of so many mean steps is an evaluation or a checkpoint
_LEAST = 0.05  # of the time lost to waiting: less is not worth a change
_NO_STEP_S = 1e-4  # a step that takes less trains nothing
_APART = 3  # times as fast or slow by itself as the loop shows: not of the same loader
_UNSURE = (
    "something else was running, the loop was short, or the loader is slow now and then (as a shard is "
    "opened, or until its cache is full); watch more steps, or longer, on an idle machine."
)


def _kept(batch: Any) -> Any:
    """A copy, as the loader may put later batches into the same memory; of what can't be copied the batch."""
    if "numpy" not in sys.modules:  # nor torch, which take a while to import: no array is in it
        return batch
    from adaecho.echo.memory.tree import duplicate

    with suppress(TypeError):  # as a deep copy raises
        return duplicate(batch)
    return batch


class HostClock:
    """Marks points in time, here the processor's."""

    def mark(self) -> Any:
        """Now."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two marks; None where the later has not come yet."""
        return float(end - begin)

    def wait_for(self, mark: Any) -> None:
        """Return once a mark has come."""


class DeviceClock(HostClock):
    """The GPU's time, by events in its stream.

    The loop runs ahead of the GPU, so that a wait of the loop costs nothing until the GPU has caught up.
    Between the event after a step and the event before the next one the GPU has nothing to do.
    """

    def mark(self) -> Any:
        """An event in the current stream."""
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two events, without waiting for them."""
        return begin.elapsed_time(end) / 1000 if end.query() else None

    def wait_for(self, mark: Any) -> None:
        """Synchronise with an event."""
        mark.synchronize()


def _clock() -> HostClock:
    torch = sys.modules.get("torch")
    return DeviceClock() if torch is not None and torch.cuda.is_initialized() else HostClock()


class Watch:
    """Measures waits and steps of a training loop; see ``watch``.

    A trainer's callback calls ``begin_step`` and ``end_step`` around each step instead of iterating, and
    ``resume`` where something else came in between (an evaluation).

    Args:
        loader: any iterable of batches; of a callback's, no more is asked than what it tells of itself.
        replay: batches that are read ahead once and kept until they are trained on; 0: none.

    Attributes:
        batches: counted steps.
        loader_s: seconds a batch that the loader takes by itself, None before it is known.
        busy: cores that this process and its children kept busy while the loader ran alone; None if unknown.
        batch_bytes: of the tensors and arrays in a batch that was read ahead; 0 where there are none.
    """

    def __init__(self, loader: Iterable[Any] | None = None, replay: int = 8) -> None:
        if replay < 0:
            raise ValueError(f"headroom.watch: replay={replay}: batches to read ahead, so at least 0")
        self._loader, self._replay = loader, replay
        self._clock = _clock()
        self._ready: Any = None  # the mark since which the loop has been asking for a batch
        self._given: Any = None
        self._read_ahead: deque[Any] = deque()
        self._iterator: Any = None  # of the pass before
        self._to_skip = 0  # steps whose waits say nothing: the loader had time to work ahead
        self._pending: deque[tuple[Any, Any, Any, str]] = deque()
        self.batches = 0
        self._wait_s = self._step_s = self._ideal_s = 0.0
        self._ideal_steps = 0
        self._probed = False
        self.loader_s: float | None = None
        self.busy: float | None = None
        self.batch_bytes = 0

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
        if self._loader is None:
            raise TypeError("headroom.Watch() watches no loader; give it one to iterate: Watch(loader)")
        batches = iter(self._loader)
        endless = self._is_ours and self._loader.settings.epochs is None  # type: ignore[attr-defined]
        # A DataLoader whose workers persist gives its iterator again, at the beginning of another pass.
        persistent = getattr(self._loader, "persistent_workers", False)
        same = not persistent and any(batches is one for one in (self._loader, self._iterator))
        if not endless and not same:
            self._read_ahead.clear()
        self._iterator = batches
        self._clock, self._ready = _clock(), None  # making workers is no wait for a batch
        for number in range(sys.maxsize):
            if self._replay and not self._probed and number == PROBE_AFTER:
                self._probe(batches)
            kind = "ideal" if self._read_ahead else "counted"
            try:
                batch = self._read_ahead.popleft() if self._read_ahead else next(batches)
            except StopIteration:
                return
            self.begin_step(kind if number else "first")
            yield batch
            self.end_step()

    def begin_step(self, kind: str = "counted") -> None:
        """A batch is there, and its step begins."""
        self._given, self._kind = self._clock.mark(), kind

    def end_step(self) -> None:
        """The step has been taken (or queued on the GPU); what follows is the wait for the next batch."""
        done = self._clock.mark()
        if self._ready is not None:
            self._pending.append((self._ready, self._given, done, self._kind))
        self._ready = done
        self._count()

    def resume(self) -> None:
        """The wait begins only now: what came since ``end_step`` was no wait for data."""
        self._ready = self._clock.mark()

    def _count(self) -> None:
        while self._pending:
            ready, given, done, kind = self._pending[0]
            step = self._clock.seconds(given, done)
            wait = self._clock.seconds(ready, given)
            if step is None or wait is None:  # the GPU has not come so far
                return
            self._pending.popleft()
            if kind == "ideal":
                self._ideal_s, self._ideal_steps = self._ideal_s + step, self._ideal_steps + 1
            elif self._to_skip:
                self._to_skip -= 1
            elif kind == "counted" and not (self.batches > 2 and step > _PAUSE * self.step_s):
                self._wait_s, self._step_s = self._wait_s + wait, self._step_s + step
                self.batches += 1

    def _probe(self, batches: Iterator[Any]) -> None:
        """Read some batches with no step in between; they come to the loop as if nothing had been."""
        self._probed = True  # once: what a short pass reads ahead leaves no step that waits
        workers = self.workers or 0
        queue = math.ceil(workers * int(getattr(self._reader, "prefetch_factor", None) or 0) * self._echoed)
        self._read_ahead.extend(map(_kept, islice(batches, queue)))
        # Workers that began together give batches together: whole rounds of them.
        of_each = max(math.ceil(workers * self._echoed), 1)
        pulls = -(-self._replay // of_each) * of_each
        spent: list[float] = []
        computed_s, host = cpu_s(), HostClock()
        begin = now = host.mark()
        for batch in islice(batches, pulls):
            spent.append(host.mark() - now)
            self._read_ahead.append(_kept(batch))
            now = host.mark()
            if now - begin > LONGEST_PROBE_S and len(spent) >= max(of_each, 2):
                break
        # What a loader that tells of no workers had ready comes at once, and a part of the next one was done.
        ahead = 0 if workers else 1 + next((i for i, one in enumerate(spent) if one > max(spent) / 10), 0)
        spent = spent[ahead : len(spent) - len(spent) % of_each]
        if len(spent) > 1:
            self.loader_s = sum(spent) / len(spent)
            self.busy = cores_kept_busy(computed_s, now - begin)
            self.batch_bytes = num_bytes(self._read_ahead[-1])
        self._to_skip = queue + ahead
        self._ready = None  # the first of them waited for all

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
    def ideal_step_s(self) -> float | None:
        """Mean seconds of a step on a batch that was read ahead; None before any."""
        return self._ideal_s / self._ideal_steps if self._ideal_steps else None

    @property
    def lost(self) -> float:
        """Share of the loop's time that went into waiting, 0 to 1."""
        return self._wait_s / (self._wait_s + self._step_s) if self.batches else float("nan")

    @property
    def workers(self) -> int | None:
        """Of the loader; 0 of one that reads in the loop's own thread, None where it doesn't tell."""
        told = getattr(self._reader, "num_workers", None)
        return told if isinstance(told, int) else None

    @property
    def _reader(self) -> Any:
        """Whose workers read: of an EchoLoader around a loader that has some, that loader."""
        inner = getattr(self._loader, "dataset", None) if self._is_ours else None
        return inner if getattr(inner, "num_workers", 0) else self._loader

    @property
    def upstream_s(self) -> float:
        """Seconds a batch upstream: of the loader alone, else of the loop if that waits.

        A loader that tells of no workers reads while the step waits, and no more: on a processor its waits,
        once they are more than the batches that it was run alone for, say it best.
        """
        by_waits = (
            self.workers == 0 and self.batches > self._replay and not isinstance(self._clock, DeviceClock)
        )
        if self.loader_s is not None and not by_waits:
            return self.loader_s
        return self.wait_s if self.workers == 0 else self.wait_s + self.step_s

    @property
    def downstream_s(self) -> float:
        """Seconds of a step on a batch at hand, or where none was, of the loop's steps."""
        return self.step_s if self.ideal_step_s is None else self.ideal_step_s

    @property
    def R(self) -> float:  # noqa: N802 (the paper's letter)
        """t_upstream / t_downstream (paper, section 2)."""
        return self.upstream_s / self.downstream_s

    @property
    def ideal_gain(self) -> float:
        """How many times as fast the loop would be if it never waited."""
        return (self.wait_s + self.step_s) / self.downstream_s

    def gain(self, factor: float, fresh_ratio: float) -> float:
        """How many times as fast the target is reached with echoing, reading beside the step in both cases.

        A fresh batch and its e steps take max(t_upstream, e t_downstream) (paper, equation 1).

        Args:
            factor: e.
            fresh_ratio: fresh examples to the target with echoing over those without.
        """
        without = max(self.upstream_s, self.downstream_s)
        return without / (fresh_ratio * max(self.upstream_s, factor * self.downstream_s))

    def report(self) -> str:
        """A few lines: time lost, R, the gain to expect by the records, and what to try first."""
        if self._pending:
            self._clock.wait_for(self._pending[-1][2])
            self._count()
        if not self.batches:
            return "headroom: no step was counted yet (the first of each pass is not)"
        waits = (
            f"headroom, {self.batches} steps: {1000 * self.wait_s:.2f} ms of waiting and "
            f"{1000 * self.step_s:.2f} ms of step for each; {self.lost:.0%} of the time was lost to waiting"
        )
        if self.downstream_s < _NO_STEP_S:
            return f"{waits}\nNo R: a step takes no time, so nothing is trained between batches."
        about = "" if self.loader_s is not None else " at most, since the loader was not run alone"
        ratio = (
            f"R = {self.R:.2f}{about}: upstream {1000 * self.upstream_s:.2f} ms a batch, a step on a batch "
            f"at hand {1000 * self.downstream_s:.2f} ms; never waiting would be {self.ideal_gain:.2f} times "
            "as fast"
        )
        return "\n".join([waits, ratio, *self._conclusion()])

    def _conclusion(self) -> list[str]:
        if self.lost < _LEAST:
            return ["The loop hardly waits for data: nothing to do."]
        period = self.wait_s + self.step_s
        least = period if self.workers else self.wait_s  # where the loop waits it is as slow as its loader
        if self.ideal_gain < 1 or not least / _APART <= self.upstream_s <= period * _APART:
            return [f"These contradict one another: {_UNSURE}"]
        tried = [f"{number}. {one}" for number, one in enumerate(steps(self._loop), 1)]
        if self.R >= LEAST_RATIO and self._echoed == 1:  # the records compare with no echoing
            tried.append(self._expected())
        return tried or ["The loader is no slower than the step: nothing to do."]

    @property
    def _loop(self) -> Loop:
        try:
            batches = len(self)
        except TypeError:
            batches = 0
        return Loop(
            self.wait_s, self.step_s, self.upstream_s, self.downstream_s, self.workers,
            self._is_ours and self._reader is self._loader and not getattr(self._loader, "processes", False),
            self.busy, cores(), self.batch_bytes, batches, self._echoed,
        )  # fmt: skip

    def _expected(self) -> str:
        gains: dict[str, list[float]] = {}
        for row in expected():
            gains.setdefault(row["variant"], []).append(self.gain(row["factor"], row["fresh_ratio"]))
        ranges = [f"{name} {min(found):.2f} to {max(found):.2f}" for name, found in gains.items()]
        records = ", ".join(dict.fromkeys(row["record"] for row in expected()))
        return (
            f"Times as fast with echoing at e = 2, if yours goes as {records} (small tuned models): "
            + "; ".join(ranges)
        )

    @property
    def _is_ours(self) -> bool:
        if "adaecho.echo.loader" not in sys.modules:  # nor torch, which takes a while to import
            return False
        from adaecho.echo import EchoLoader

        return isinstance(self._loader, EchoLoader)

    @property
    def _echoed(self) -> float:
        """How often the loader repeats already; 1 for any but an EchoLoader."""
        return float(self._loader.factor) if self._is_ours else 1.0  # type: ignore[union-attr]


def watch(loader: Iterable[Any], *, replay: int = 8) -> Watch:
    """Watch a training loop: how long it waits for data, how long a step takes, and what would help.

    Iterate over the result in place of ``loader``; the batches are the same, in the same order. After some
    steps a few batches are read ahead without a step in between, which tells how fast the loader is by
    itself, and are then trained on, which tells the step's time with a batch at hand. ``report()`` tells it
    at any time, and is printed where a ``with`` ends. On a GPU the times are those of events in its stream:
    nothing in the loop waits for it. What was read ahead is taken for the loader: a state that an EchoLoader
    tells before it has been trained on lies behind it, so save none while one is watched.

    Args:
        loader: any iterable of batches.
        replay: batches to read ahead once (a DataLoader's own queue comes on top), all in memory together; 0
            leaves it out, and R is told from the waits.
    """
    return Watch(loader, replay)
