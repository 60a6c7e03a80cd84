"""Learning-rate schedules over SGD steps."""

from adaecho.config.schema import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, peak: float, step: int) -> float:
    """Learning rate of the update that follows ``step`` earlier ones.

    ``constant`` is ``peak``. ``linear_decay`` falls linearly from ``peak`` to ``peak / decay_factor`` over
    ``decay_steps`` steps and stays there (paper, footnote 6). The first ``warmup_steps`` steps multiply it by
    (step + 1) / warmup_steps.

    Args:
        schedule: shape and its parameters.
        peak: learning rate at step 0.
        step: number of updates done, >= 0; under AdaScale the whole part of the scale-invariant steps.
    """
    if step < schedule.warmup_steps:
        peak *= (step + 1) / schedule.warmup_steps
    if schedule.shape == "constant":
        return peak
    assert schedule.decay_steps is not None  # schema.validate
    done = min(step / schedule.decay_steps, 1.0)
    return peak * (1.0 - done * (1.0 - 1.0 / schedule.decay_factor))
