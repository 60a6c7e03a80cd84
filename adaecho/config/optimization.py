"""The sections ``optimizer`` and ``schedule`` of a config."""

from dataclasses import dataclass

from omegaconf import MISSING

from adaecho.errors import ConfigError

SCHEDULES = ("constant", "linear_decay", "cosine", "drops")
OPTIMIZERS = ("sgd", "adam", "adamw")
COUNTS = ("steps", "fresh_examples")


@dataclass
class OptimizerConfig:
    """SGD with Nesterov or heavy-ball momentum, as in the paper, or Adam or AdamW."""

    learning_rate: float = MISSING  # before schedule and AdaScale gain
    momentum: float = MISSING  # sgd only
    nesterov: bool = MISSING  # sgd only; false: heavy-ball momentum
    weight_decay: float = 0.0  # decoupled with adamw, otherwise added to the gradient
    name: str = "sgd"  # sgd | adam | adamw
    beta1: float = 0.9  # adam and adamw only
    beta2: float = 0.999  # adam and adamw only
    epsilon: float = 1e-8  # adam and adamw only
    decay_norms_and_biases: bool = True  # false: no decay of parameters with fewer than two dimensions
    clip_norm: float | None = None  # maximum norm of the gradient; null: no clipping
    fused: bool = False  # torch's fused kernel; with adascale on a GPU, steps then do not synchronize
    zero_redundancy: bool = False  # shard the optimizer state over ranks (ZeRO stage 1)
    # evaluate and save an exponential moving average of the weights with this decay, e.g. 0.999; null: off
    ema_decay: float | None = None


@dataclass
class ScheduleConfig:
    """Learning-rate schedule. Durations are given in steps or in epochs."""

    shape: str = "constant"  # constant | linear_decay | cosine | drops
    decay_steps: int | None = None  # duration of linear_decay and cosine; constant afterwards
    decay_factor: float = 100.0  # final learning rate is learning_rate / decay_factor
    warmup_steps: int = 0  # linear warmup, multiplied with the shape
    decay_epochs: float | None = None  # instead of decay_steps
    warmup_epochs: float | None = None  # instead of warmup_steps
    # drops: divide the learning rate by drop_factor at this step, and once more after drop_gap_steps
    first_drop_steps: int | None = None
    first_drop_epochs: float | None = None  # instead of first_drop_steps
    drop_gap_steps: int | None = None  # null: only one drop
    drop_gap_epochs: float | None = None  # instead of drop_gap_steps
    drop_factor: float = 10.0  # divisor at each drop
    # unit of the schedule: steps (optimizer steps) | fresh_examples (batch_size fresh examples are one step,
    # so repeats do not advance the schedule); warmup always counts optimizer steps
    counts: str = "steps"


def check_schedule(schedule: ScheduleConfig) -> None:
    """Check that each duration is given once, and the one that the shape needs is given."""
    for name in ("decay", "warmup", "first_drop", "drop_gap"):
        steps, epochs = getattr(schedule, f"{name}_steps"), getattr(schedule, f"{name}_epochs")
        if steps and epochs is not None:
            raise ConfigError(
                f"schedule.{name}_steps={steps} and schedule.{name}_epochs={epochs}: give one of the two"
            )
        needed = {"linear_decay": "decay", "cosine": "decay", "drops": "first_drop"}.get(schedule.shape)
        if name == needed and not (steps or epochs):
            raise ConfigError(
                f"schedule.{name}_steps={steps}: schedule.shape={schedule.shape} needs a positive number of "
                f"steps, or schedule.{name}_epochs"
            )
