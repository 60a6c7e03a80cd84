"""How long upstream and downstream of the echo take, and their ratio R (paper, section 2)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_DECAY = 0.98  # weight of the past at each step: about the last 50 steps count
_LEAST_STEPS = 5  # before R is told
_TOGETHER = 10  # steps that enter the sums at once: the loader's counters take a while to read


@dataclass
class Counters:
    """What the loader has done so far, all threads together."""

    upstream_busy_s: float
    downstream_busy_s: float
    fresh_batches: float


class Clocks:
    """Smoothed times, sums that forget slowly.

    * ``upstream_s_per_batch``: busy worker time per fresh batch over the number of workers; waiting for
      a full queue is not busy.
    * ``downstream_s_per_step``: the larger of the loader's own work after the echo and the step, the time
      between two batches that the consumer keeps to itself.

    Args:
        workers: threads that work upstream.
        counters: what the loader has done so far.
    """

    def __init__(self, workers: int, counters: Callable[[], Counters]) -> None:
        self._workers, self._counters = workers, counters
        self.wait_time_s = 0.0
        self._sums = dict.fromkeys(("upstream_s", "fresh_batches", "own_s", "step_s", "steps"), 0.0)
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
        if not self._steps or self._before is None:
            return
        before, now = self._before, self._counters()
        sums = self._sums
        for name in sums:
            sums[name] *= _DECAY**self._steps
        sums["upstream_s"] += now.upstream_busy_s - before.upstream_busy_s
        sums["own_s"] += now.downstream_busy_s - before.downstream_busy_s
        sums["fresh_batches"] += now.fresh_batches - before.fresh_batches
        sums["step_s"] += self._step_s
        sums["steps"] += self._steps
        self._before, self._step_s, self._steps = now, 0.0, 0

    @property
    def upstream_s_per_batch(self) -> float:
        self._sum_up()
        fresh = self._sums["fresh_batches"]
        return self._sums["upstream_s"] / fresh / self._workers if fresh else 0.0

    @property
    def downstream_s_per_step(self) -> float:
        self._sum_up()
        steps = self._sums["steps"]
        return max(self._sums["own_s"], self._sums["step_s"]) / steps if steps else 0.0

    @property
    def ratio(self) -> float | None:
        """R; None before it is known."""
        self._sum_up()
        if self._sums["steps"] < _LEAST_STEPS * _DECAY**_LEAST_STEPS or not self._sums["fresh_batches"]:
            return None
        downstream = self.downstream_s_per_step
        return self.upstream_s_per_batch / downstream if downstream > 0 else None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        self._sum_up()
        return {"wait_time_s": self.wait_time_s, **self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.wait_time_s = state["wait_time_s"]
        self._sums = {name: state[name] for name in self._sums}
        self._before = self._returned_at = None
        self._step_s, self._steps = 0.0, 0
