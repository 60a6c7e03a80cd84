"""The read-only properties of an EchoLoader: its counters and timers."""

import time
import weakref
from collections.abc import Callable
from typing import Any

from adaecho.echo.order.stream import History
from adaecho.echo.pipeline import Counters, Pipeline
from adaecho.echo.read.rows import RandomReader
from adaecho.echo.settings import Settings
from adaecho.echo.state import LoaderCursor

_DECAY = 0.98  # factor by which older times lose weight at each step, so that about 50 steps count
_LEAST_STEPS = 5  # number of steps before R is known
_TOGETHER = 10  # number of steps added to the sums at once, because reading the counters takes a while


class Timers:
    """Measures loading and step times, smoothed exponentially over about 50 steps.

    Args:
        counters: function that returns the seconds spent so far in each stage of the loader.
    """

    def __init__(self, counters: Callable[[], Counters]) -> None:
        self._counters = counters
        self.wait_time_s = 0.0
        # Smoothed sums of the counters, step times and step counts.
        self._upstream_s: list[float] = []
        self._own_s: list[float] = []
        self._fresh_batches = self._all_steps_s = self._all_steps = 0.0
        self._before: Counters | None = None
        self._returned_at: float | None = None
        self._asked_s = 0.0  # time that the training loop waited for the loader within the current step
        self._step_s, self._steps = 0.0, 0  # seconds and number of steps since the last update of the sums

    def pause(self) -> None:
        """Leave the current step, which may include an evaluation, out of the measurement."""
        self._sum_up()
        self._before = self._returned_at = None

    def waited(self, since: float) -> None:
        """Add the time since ``since``, during which the training loop waited for a batch."""
        waited = time.perf_counter() - since
        self.wait_time_s += waited
        self._asked_s += waited

    def step(self) -> None:
        """Record that the training loop receives a batch, so one step ends and the next begins."""
        returned_at, self._returned_at = self._returned_at, time.perf_counter()
        asked_s, self._asked_s = self._asked_s, 0.0
        if returned_at is None:
            self._before = self._counters()
            return
        self._step_s += self._returned_at - returned_at - asked_s
        self._steps += 1
        if self._steps >= _TOGETHER:
            self._sum_up()

    def _sum_up(self) -> None:
        before = self._before  # a pause in another thread may clear it
        if not self._steps or before is None:
            return
        now, keep = self._counters(), _DECAY**self._steps
        self._upstream_s = _grown(self._upstream_s, keep, before.upstream_s, now.upstream_s)
        self._own_s = _grown(self._own_s, keep, before.own_s, now.own_s)
        self._fresh_batches = keep * self._fresh_batches + now.fresh_batches - before.fresh_batches
        self._all_steps_s = keep * self._all_steps_s + self._step_s
        self._all_steps = keep * self._all_steps + self._steps
        self._before, self._step_s, self._steps = now, 0.0, 0

    @property
    def upstream_s_per_batch(self) -> float:
        self._sum_up()
        return max(self._upstream_s) / self._fresh_batches if self._fresh_batches else 0.0

    @property
    def downstream_s_per_step(self) -> float:
        self._sum_up()
        return max(*self._own_s, self._all_steps_s) / self._all_steps if self._all_steps else 0.0

    @property
    def ratio(self) -> float | None:
        """Loading time divided by step time, called R; None until it is known."""
        downstream = self.downstream_s_per_step
        enough = self._all_steps >= _LEAST_STEPS * _DECAY**_LEAST_STEPS and self._fresh_batches
        return self.upstream_s_per_batch / downstream if enough and downstream > 0 else None

    def state(self) -> list[float]:
        """Return the sums as a list of numbers, for a saved state."""
        self._sum_up()
        sums = self.wait_time_s, self._fresh_batches, self._all_steps_s, self._all_steps
        return [*sums, *self._upstream_s, *self._own_s]

    def load_state(self, state: list[float]) -> None:
        """Continue with the sums from a saved state."""
        self.wait_time_s, self._fresh_batches, self._all_steps_s, self._all_steps = state[:4]
        self._upstream_s, self._own_s = list(state[4:-2]), list(state[4:][-2:])
        self._before = self._returned_at = None
        self._step_s, self._steps = 0.0, 0


def _grown(sums: list[float], keep: float, before: tuple[float, ...], now: tuple[float, ...]) -> list[float]:
    earlier = sums or [0.0] * len(now)
    return [keep * total + new - old for total, old, new in zip(earlier, before, now, strict=True)]


class LoaderStats:
    """The read-only properties of an EchoLoader, as of the last batch that it returned."""

    _position: LoaderCursor
    _pipeline: Pipeline
    _clocks: Timers
    dataset: Any
    _resumed: bool
    _newest: "weakref.ref[Any] | None" = None  # the newest iterator
    _next_iteration: int | None
    settings: Settings

    @property
    def _iterating(self) -> bool:
        """Whether the newest iterator of the loader still exists."""
        return self._newest is not None and self._newest() is not None

    @property
    def epoch(self) -> int:
        """Zero-based number of the epoch that the next ``iter()`` starts or continues.

        After ``load_state_dict()``, resume with ``for epoch in range(loader.epoch, epochs)``.
        """
        position, is_endless = self._position, self.settings.epochs is None
        if self._next_iteration is None or is_endless or (self._resumed and position.in_pass):
            goes_on = position.in_pass and (self._iterating or self._resumed or is_endless)
            return position.iteration - goes_on
        return self._next_iteration - 1

    @property
    def fresh_examples(self) -> int:
        """Number of fresh examples that this rank needed for the batches returned so far."""
        return self._position.fresh_examples

    @property
    def examples_read(self) -> int:
        """Number of examples that this rank has read so far, including read-ahead."""
        return self._pipeline.examples_read

    @property
    def fresh_examples_in_buffer(self) -> int:
        """Number of distinct fresh examples that the buffers contain for later batches."""
        return self._pipeline.streams.num_held(self._position)

    @property
    def reread_examples(self) -> int:
        """Number of examples read again to resume, which ``fresh_examples`` does not include."""
        return self._position.reread_examples

    @property
    def bad_examples(self) -> list[dict[str, Any]]:
        """The examples that the loader skipped because it could not read or decode them.

        Each is a dict. ``index`` is the number of the example in this rank's reading order, ``origin`` is its
        name, and ``error`` is the error as text. ``row`` is its row in the source, or None if unknown.
        """
        return [
            bad for bad in self._pipeline.streams.log.bad.found if bad["index"] < self._position.next_index
        ]

    @property
    def factor(self) -> float:
        """The current echoing factor, which changes during training under ``factor="auto"``."""
        return self._factors[-1][1]

    @property
    def factor_changes(self) -> list[tuple[int, float]]:
        """Changes of the echoing factor, as pairs (number of the first fresh example, new factor).

        For example, (5000, 2.5) means that the factor is 2.5 from fresh example 5000 on. Fresh examples come
        from the source and are not repeats. Each rank numbers its own from 0, over all epochs. With
        ``echo="batch"``, the pair contains the number of a fresh batch instead.
        """
        return self._factors[1:]

    @property
    def _factors(self) -> History:
        streams, position = self._pipeline.streams, self._position
        index = position.next_number if streams.echoes_batches else position.next_index
        return streams.factor.before(index)

    def _num_batches(self, iteration: int, first_index: int, first_number: int, *, begun: bool) -> int:
        """Return how many batches an iteration yields; raise TypeError if this cannot be known in advance."""
        # The iteration starts with this rank's example ``first_index`` and fresh batch ``first_number``.
        settings, streams, source = self.settings, self._pipeline.streams, self._pipeline.source
        reader = self._pipeline.reader
        if settings.epochs is None or settings.factor == "auto" or source.length is None:
            raise TypeError("len(EchoLoader) needs epochs=, factor= as a number, and a source with a length")
        end = first_index + source.length * settings.epochs
        if isinstance(reader, RandomReader):
            first_index, end = reader.span(iteration)
        # The current echoing factor applies to all examples of an iteration that has not begun.
        examples = streams.log.examples if begun else streams.log.examples.begun(first_index)
        items = examples.total(first_index, end - first_index)
        batches = items // streams.batch_size if settings.drop_last else -(-items // streams.batch_size)
        return streams.log.batches.total(first_number, batches)

    @property
    def wait_time_s(self) -> float:
        """Total time in seconds that the training loop has waited for batches."""
        return self._clocks.wait_time_s

    @property
    def upstream_s_per_batch(self) -> float:
        """Loading time in seconds per fresh batch: the time of the slowest stage before the echo.

        A fresh batch comes from the source and is not a repeat. If several workers share the work of a stage,
        its time is divided by their number. Only one thread reads an iterable, so its reading time is not
        divided.

        Some sources read ahead themselves, for example a ``DataLoader`` with workers. For these, only the
        time that the EchoLoader waits for the source is counted. Use at least ``num_workers=1`` here: with 0,
        the result is too low, because the source also loads during the training step.
        """
        return self._clocks.upstream_s_per_batch

    @property
    def downstream_s_per_step(self) -> float:
        """Seconds per training step, or per step of the loader's work after the echo if that is longer."""
        return self._clocks.downstream_s_per_step

    @property
    def R(self) -> float | None:  # noqa: N802 (the paper's name)
        """The loading time divided by the step time (paper, section 2); None until it is known.

        It equals ``upstream_s_per_batch / downstream_s_per_step``.
        """
        return self._clocks.ratio

    def __repr__(self) -> str:
        return f"EchoLoader({type(self.dataset).__name__}, {self.settings})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an EchoLoader cannot be copied or pickled, because it owns threads and an open source. Create "
            "it in each process with the same arguments, and pass state_dict() to load_state_dict()"
        )
