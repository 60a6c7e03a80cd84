"""Learning-rate schedules as a function of optimizer steps or of fresh examples."""

import math

from adaecho.config.schema import ScheduleConfig
from adaecho.errors import ConfigError


class Schedule:
    """A learning-rate schedule with an optional linear warmup.

    * ``constant``: the learning rate is always ``peak``.
    * ``linear_decay``: the learning rate decays linearly from ``peak`` to ``peak / decay_factor``, and then
      stays constant (paper, footnote 6).
    * ``cosine``: the learning rate decays between the same values along half a cosine wave (I. Loshchilov and
      F. Hutter, "SGDR", 2017, without restarts).
    * ``step_decay``: the learning rate is divided by ``milestone_factor`` at one or two milestones (paper,
      section 3.1, for SSD).

    During a warmup of n steps, the k-th step uses k/n of the scheduled learning rate.

    Args:
        config: shape and durations of the schedule.
        peak: learning rate before any decay.
        steps_per_epoch: number of examples in an epoch divided by the batch size; None if unknown.
    """

    def __init__(self, config: ScheduleConfig, peak: float, steps_per_epoch: float | None = None) -> None:
        self._config, self._peak, self._steps_per_epoch = config, peak, steps_per_epoch
        self._warmup = self._steps("warmup") or 0.0
        self._decay = self._steps("decay") or 0.0  # check_schedule rejects decaying shapes without a duration
        self._first_milestone, self._gap = self._steps("first_milestone") or 0.0, self._steps("milestone_gap")

    def _steps(self, name: str) -> float | None:
        epochs: float | None = getattr(self._config, f"{name}_epochs")
        if epochs is None:
            steps: int | None = getattr(self._config, f"{name}_steps")
            return steps
        if self._steps_per_epoch is None:
            raise ConfigError(
                f"schedule.{name}_epochs={epochs}: the length of an epoch is unknown for streamed data; set "
                f"schedule.{name}_steps"
            )
        return epochs * self._steps_per_epoch

    def rate(self, position: float, updates: int | None = None) -> float:
        """Return the learning rate of the next optimizer step."""
        # position is how far the decay has advanced, in steps. It can differ from the number of completed
        # steps, for example if the schedule counts fresh examples. The warmup uses that number (updates) if
        # given, because examples that fill the buffer before the first step must not shorten the warmup.
        rate, risen = self._peak, position if updates is None else updates
        if risen < self._warmup:
            rate *= min((risen + 1) / self._warmup, 1.0)  # a warmup in epochs may end within a step
        if self._config.shape in ("linear_decay", "cosine"):
            done = min(position / self._decay, 1.0)
            if self._config.shape == "cosine":
                done = (1 - math.cos(math.pi * done)) / 2
            return rate * (1.0 - done * (1.0 - 1.0 / self._config.decay_factor))
        if self._config.shape == "step_decay":
            second = None if self._gap is None else self._first_milestone + self._gap
            milestones = sum(at is not None and position >= at for at in (self._first_milestone, second))
            return rate / self._config.milestone_factor**milestones
        return rate
