"""How long upstream and downstream of the echo take, and their ratio R (paper, section 2)."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

_DECAY = 0.98  # weight of the past at each step: about the last 50 steps count
_LEAST_STEPS = 5  # before R is told
_TOGETHER = 10  # steps that enter the sums at once: the loader's counters take a while to read


class Counters(NamedTuple):
    """What the loader has done so far.

    Attributes:
        upstream_s: of each stage of upstream and what bounds it; they work beside each other, so that
            the largest of these is the time upstream takes.
        own_s: likewise of the loader's own work after the echo.
        fresh_batches: how many upstream has made.
    """

    upstream_s: tuple[float, ...]
    own_s: tuple[float, ...]
    fresh_batches: float


class Timers:
    """Smoothed times, sums that forget slowly.

    * ``upstream_s_per_batch``: time per fresh batch of the slowest part of upstream, over as many threads as
      can work on it at once; waiting for a full queue is not counted.
    * ``downstream_s_per_step``: the larger of the loader's own work after the echo and the step, the time
      between two batches that the consumer keeps to itself.

    Args:
        counters: what the loader has done so far.
    """

    def __init__(self, counters: Callable[[], Counters]) -> None:
        self._counters = counters
        self.wait_time_s = 0.0
        # Sums of the counters, the seconds of steps, and steps.
        self._upstream_s: list[float] = []
        self._own_s: list[float] = []
        self._fresh_batches = self._all_steps_s = self._all_steps = 0.0
        self._before: Counters | None = None
        self._returned_at: float | None = None
        self._asked_s = 0.0  # of the current step, spent waiting for the loader
        self._step_s, self._steps = 0.0, 0  # since the sums were brought up to date

    def pause(self) -> None:
        """The current step is interrupted by something else: don't count it."""
        self._sum_up()
        self._before = self._returned_at = None

    def waited(self, since: float) -> None:
        """The consumer has waited for the loader since then."""
        waited = time.perf_counter() - since
        self.wait_time_s += waited
        self._asked_s += waited

    def step(self) -> None:
        """A batch goes to the consumer: a step has ended and the next one begins."""
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
        before = self._before  # another thread, which asks for a state, may meet a pause
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
        """R; None before it is known."""
        downstream = self.downstream_s_per_step
        enough = self._all_steps >= _LEAST_STEPS * _DECAY**_LEAST_STEPS and self._fresh_batches
        return self.upstream_s_per_batch / downstream if enough and downstream > 0 else None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        self._sum_up()
        sums = self._upstream_s, self._own_s, self._fresh_batches, self._all_steps_s, self._all_steps
        return {"wait_time_s": self.wait_time_s, "sums": list(sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.wait_time_s = state["wait_time_s"]
        self._upstream_s, self._own_s, self._fresh_batches, self._all_steps_s, self._all_steps = state["sums"]
        self._before = self._returned_at = None
        self._step_s, self._steps = 0.0, 0


def _grown(sums: list[float], keep: float, before: tuple[float, ...], now: tuple[float, ...]) -> list[float]:
    earlier = sums or [0.0] * len(now)
    return [keep * total + new - old for total, old, new in zip(earlier, before, now, strict=True)]
