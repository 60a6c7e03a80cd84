"""The sections ``optimizer`` and ``schedule`` of a config."""

from dataclasses import dataclass

from omegaconf import MISSING

from adaecho.config.bounds import at_least, finite_at_least, one_of, positive, within
from adaecho.errors import ConfigError

SCHEDULES = ("constant", "linear_decay", "cosine", "drops")
OPTIMIZERS = ("sgd", "adam", "adamw")
COUNTS = ("steps", "fresh_examples")


@dataclass
class OptimizerConfig:
    """SGD with Nesterov or heavy-ball momentum, as in the paper's experiments; Adam and AdamW beside."""

    learning_rate: float = MISSING  # before schedule and gain
    momentum: float = MISSING  # of sgd
    nesterov: bool = MISSING  # of sgd; false is heavy-ball momentum
    weight_decay: float = 0.0  # decoupled under adamw, else added to the gradient
    name: str = "sgd"  # sgd | adam | adamw
    beta1: float = 0.9  # of adam and adamw, with torch's defaults
    beta2: float = 0.999  # of adam and adamw
    epsilon: float = 1e-8  # of adam and adamw
    decay_norms_and_biases: bool = True  # false: weight_decay spares parameters of fewer than two dimensions
    clip_norm: float | None = None  # the largest norm of the whole gradient; null doesn't clip
    fused: bool = False  # one kernel for all parameters; with adascale on a GPU no step waits for it
    zero_redundancy: bool = False  # share the optimizer's state out over ranks (ZeRO stage 1)
    # An average of the weights with this decay (0.999, say) is what is evaluated and kept; null: the weights.
    ema_decay: float | None = None


@dataclass
class ScheduleConfig:
    """Learning rate over a run; see ``adaecho.training.schedule``. A duration is in steps or in epochs."""

    shape: str = "constant"  # constant | linear_decay | cosine | drops
    decay_steps: int | None = None  # linear_decay and cosine fall by decay_factor over these and stay there
    decay_factor: float = 100.0  # the rate ends at learning_rate / decay_factor
    warmup_steps: int = 0  # a linear rise to the full rate over this many first steps, multiplying the shape
    decay_epochs: float | None = None  # in place of decay_steps
    warmup_epochs: float | None = None  # in place of warmup_steps
    # drops divides the rate by drop_factor at the first drop, and again a gap later; null: one drop only.
    first_drop_steps: int | None = None
    first_drop_epochs: float | None = None  # in place of first_drop_steps
    drop_gap_steps: int | None = None  # between the two drops; null: one drop only
    drop_gap_epochs: float | None = None  # in place of drop_gap_steps
    drop_factor: float = 10.0  # of each drop
    # What steps and epochs count. steps: SGD updates; an epoch is as many as give each example once.
    # fresh_examples: a step is batch_size fresh examples and an epoch all of them, however often repeated;
    # a warm-up counts SGD updates all the same, as what fills the buffer comes before the first.
    counts: str = "steps"


def check_optimizer(optimizer: OptimizerConfig) -> None:
    one_of("optimizer.name", optimizer.name, OPTIMIZERS)
    positive("optimizer.learning_rate", optimizer.learning_rate)
    for key in ("momentum", "beta1", "beta2"):
        within(f"optimizer.{key}", getattr(optimizer, key), "[0, 1)")
    if optimizer.name == "sgd" and optimizer.nesterov and optimizer.momentum == 0:
        raise ConfigError("optimizer.nesterov=true needs optimizer.momentum > 0")
    positive("optimizer.epsilon", optimizer.epsilon)
    positive("optimizer.clip_norm", optimizer.clip_norm, "doesn't clip")
    if optimizer.ema_decay is not None:
        within("optimizer.ema_decay", optimizer.ema_decay, "[0, 1)")
    finite_at_least("optimizer.weight_decay", optimizer.weight_decay, 0)


def check_schedule(schedule: ScheduleConfig) -> None:
    one_of("schedule.shape", schedule.shape, SCHEDULES)
    one_of("schedule.counts", schedule.counts, COUNTS)
    for name in ("decay", "warmup", "first_drop", "drop_gap"):
        _validate_duration(schedule, name)
    needed = {"linear_decay": "decay", "cosine": "decay", "drops": "first_drop"}.get(schedule.shape)
    if needed and not _duration(schedule, needed):
        raise ConfigError(
            f"schedule.{needed}_steps={getattr(schedule, needed + '_steps')}: "
            f"schedule.shape={schedule.shape} needs a positive number of steps, or schedule.{needed}_epochs"
        )
    finite_at_least("schedule.decay_factor", schedule.decay_factor, 1)
    finite_at_least("schedule.drop_factor", schedule.drop_factor, 1)


def _validate_duration(schedule: ScheduleConfig, name: str) -> None:
    steps, epochs = getattr(schedule, f"{name}_steps"), getattr(schedule, f"{name}_epochs")
    if steps and epochs is not None:
        raise ConfigError(
            f"schedule.{name}_steps={steps} and schedule.{name}_epochs={epochs}: say it in one of the two"
        )
    at_least(f"schedule.{name}_steps", steps, 0)
    positive(f"schedule.{name}_epochs", epochs, "means none")


def _duration(schedule: ScheduleConfig, name: str) -> float | None:
    steps: float | None = getattr(schedule, f"{name}_steps")
    epochs: float | None = getattr(schedule, f"{name}_epochs")
    return steps if epochs is None else epochs
