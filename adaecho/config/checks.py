"""What a config's types can't say: ranges, choices, and values that don't go together."""

import math

from adaecho.config.schema import BUDGETS, Config, EchoConfig
from adaecho.errors import ConfigError

ECHO_VARIANTS = ("none", "batch", "example_before_augmentation", "example_after_augmentation")
SCHEDULES = ("constant", "linear_decay")
PRECISIONS = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
TRACKERS = ("none", "wandb")
MAX_FACTOR = 2**16  # the loader's keys hold an echo index of 16 bits
MAX_THREADS = 1024


def validate(config: Config) -> None:
    """Check what types can't say.

    Raises:
        ConfigError: naming key, value, reason and remedy.
    """
    if config.data.path is not None and not config.data.path.strip():
        raise ConfigError("data.path: is empty; give a path, a hub id or a url, or null for embedded data")
    _one_of("echo.variant", config.echo.variant, ECHO_VARIANTS)
    _one_of("schedule.shape", config.schedule.shape, SCHEDULES)
    _one_of("precision", config.precision, PRECISIONS)
    _one_of("device", config.device, DEVICES)
    _one_of("tracking.kind", config.tracking.kind, TRACKERS)
    _one_of("tracking.mode", config.tracking.mode, ("offline", "online"))
    _validate_factor(config.echo)
    _at_least("batch_size", config.batch_size, 1)
    _at_least("threads", config.threads, 1)
    if config.threads > MAX_THREADS:
        raise ConfigError(f"threads={config.threads}: more than {MAX_THREADS}, which no processor has")
    if not config.max_loss > 0:
        raise ConfigError(f"max_loss={config.max_loss}: must be positive; beyond it a run counts as diverged")
    _at_least("echo.shuffle_buffer", config.echo.shuffle_buffer, 1)
    _at_least("echo.batch_shuffle_buffer", config.echo.batch_shuffle_buffer, 0)
    _at_least("schedule.warmup_steps", config.schedule.warmup_steps, 0)
    _at_least("evaluate.every_fresh_examples", config.evaluate.every_fresh_examples, 1)
    _at_least("evaluate.batch_size", config.evaluate.batch_size, 1)
    _at_least("data.validation_examples", config.data.validation_examples, 1)
    _at_least("data.num_workers", config.data.num_workers, 0)
    _at_least("data.prefetch", config.data.prefetch, 0)
    _at_least("data.split_seed", config.data.split_seed, 0)
    _at_least("seed", config.seed, 0)
    _finite_at_least("checkpoint_every_s", config.checkpoint_every_s, 0)
    _at_least("data.max_bad_examples", config.data.max_bad_examples, 0)
    _at_least("search.trials", config.search.trials, 1)
    _at_least("search.repeats", config.search.repeats, 1)
    _at_least("search.workers", config.search.workers, 1)
    if config.search.max_diverged is not None:
        _at_least("search.max_diverged", config.search.max_diverged, 0)
    for key in BUDGETS:
        value = getattr(config, key)
        if value is not None and not value > 0:
            raise ConfigError(f"{key}={value}: a budget must be positive; null means no limit")
    _validate_optimizer(config)
    _validate_adascale(config)
    if config.target.value is not None and not math.isfinite(config.target.value):
        raise ConfigError(f"target.value={config.target.value}: must be a finite number; null never stops")


def _validate_factor(echo: EchoConfig) -> None:
    factor = echo.factor
    if not 1 <= echo.max_factor < MAX_FACTOR:
        raise ConfigError(f"echo.max_factor={echo.max_factor}: must lie in [1, {MAX_FACTOR})")
    if echo.batch_shuffle_buffer and echo.variant != "batch":
        raise ConfigError(
            f"echo.batch_shuffle_buffer={echo.batch_shuffle_buffer}: only echo=batch has batches to shuffle"
        )
    if factor == "auto":
        if echo.variant == "none":
            raise ConfigError("echo.factor=auto: echo=none repeats nothing; choose an echo= variant")
        return
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor):
        raise ConfigError(f"echo.factor={factor!r}: must be a number >= 1, or auto")
    if factor < 1:
        raise ConfigError(
            f"echo.factor={factor}: every example that is read is used at least once; "
            "echo.factor=1 is no echoing"
        )
    if factor >= MAX_FACTOR:
        raise ConfigError(f"echo.factor={factor}: must be less than {MAX_FACTOR}")
    if echo.variant == "none" and factor != 1:
        raise ConfigError(
            f"echo.factor={factor}: echo=none repeats nothing; choose an echo= variant or factor 1"
        )


def _validate_optimizer(config: Config) -> None:
    rate, momentum = config.optimizer.learning_rate, config.optimizer.momentum
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"optimizer.learning_rate={rate}: must be a positive number")
    if not 0 <= momentum < 1:
        raise ConfigError(f"optimizer.momentum={momentum}: must lie in [0, 1)")
    if config.optimizer.nesterov and momentum == 0:
        raise ConfigError("optimizer.nesterov=true needs optimizer.momentum > 0")
    steps = config.schedule.decay_steps
    if config.schedule.shape == "linear_decay" and (steps is None or steps < 1):
        raise ConfigError(
            f"schedule.decay_steps={steps}: schedule.shape=linear_decay needs a positive number of steps"
        )
    _finite_at_least("schedule.decay_factor", config.schedule.decay_factor, 1)
    _finite_at_least("optimizer.weight_decay", config.optimizer.weight_decay, 0)


def _validate_adascale(config: Config) -> None:
    adascale, count = config.adascale, config.adascale.num_gradients_to_accumulate
    if not adascale.enabled:
        return
    _at_least("adascale.num_gradients_to_accumulate", count, 1)
    if config.batch_size % count:
        raise ConfigError(
            f"batch_size={config.batch_size}: can't be dealt evenly to adascale.num_gradients_to_accumulate="
            f"{count} micro-batches; make it a multiple"
        )
    if adascale.total_steps is not None and not adascale.total_steps > 0:
        raise ConfigError(f"adascale.total_steps={adascale.total_steps}: must be positive; null never stops")
    shares_examples = config.echo.factor != 1 and (
        config.echo.variant != "batch" or config.echo.batch_shuffle_buffer > 0
    )
    if count == 1 and shares_examples:
        raise ConfigError(
            "adascale.num_gradients_to_accumulate=1: the gain then comes from the difference between "
            f"consecutive batches, which echo={config.echo.variant} makes share examples; use at least 2"
        )
    if count == 1 and adascale.scale is None:
        raise ConfigError(
            "adascale.num_gradients_to_accumulate=1: give adascale.scale, how many base batches a batch is "
            "worth, or use at least 2"
        )


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value}: must be one of {', '.join(allowed)}")


def _at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{key}={value}: must be at least {least}")


def _finite_at_least(key: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}={value}: must be a finite number, at least {least}")
