"""The typed config tree: the schema that ``conf/`` fills and every override is checked against.

Types catch typos and wrong kinds at composition, ``validate`` what a type can't say. ``run_id`` names a
run folder by what can change its trajectory and by nothing else.
"""

import functools
import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from adaecho.errors import ConfigError

ECHO_VARIANTS = ("none", "batch", "example_before_augmentation", "example_after_augmentation")
SCHEDULES = ("constant", "linear_decay")
PRECISIONS = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
TRACKERS = ("none", "wandb")
MAX_FACTOR = 2**16  # the loader's keys hold an echo index of 16 bits
MAX_THREADS = 1024


@dataclass
class TaskConfig:
    """Which workload: the name of a module in ``adaecho/tasks/``."""

    name: str = MISSING


@dataclass
class DataConfig:
    """Where training examples come from and how they are split."""

    path: str | None = None  # folder, file, hub id or url; null where the task embeds its data
    validation_examples: int = (
        MISSING  # held out of the training files, by a permutation seeded with split_seed
    )
    split_seed: int = 0
    num_workers: int = 0
    prefetch: int = 2  # batches read ahead of the echo stage
    max_bad_examples: int = 0  # undecodable examples to skip (and list) before the run stops


@dataclass
class EchoConfig:
    """Which part of the pipeline is repeated, and how often (paper, section 2)."""

    variant: str = MISSING
    factor: Any = MISSING  # a number >= 1, or "auto": follow the measured R
    shuffle_buffer: int = MISSING  # examples
    batch_shuffle_buffer: int = 0  # batches, after batch echoing (paper, Fig. 7a)
    max_factor: float = 16.0  # bound of factor=auto


@dataclass
class AdaScaleConfig:
    """AdaScale around the optimizer; see ``adaecho.AdaScale`` for the arguments.

    A step's batch is dealt to ``num_gradients_to_accumulate`` micro-batches, each the base batch that the
    learning rate and its schedule are meant for (unless ``scale`` says otherwise).
    """

    enabled: bool = MISSING
    num_gradients_to_accumulate: int = 1
    scale: float | None = None
    smoothing: float | None = None
    debias_ewma: bool = True
    total_steps: float | None = None  # stop when the scale-invariant steps reach it (Algorithm 2)


@dataclass
class OptimizerConfig:
    """SGD with momentum, as in every experiment of the paper."""

    learning_rate: float = MISSING
    momentum: float = MISSING
    nesterov: bool = MISSING
    weight_decay: float = 0.0


@dataclass
class ScheduleConfig:
    """Learning rate over SGD steps; linear_decay falls by decay_factor over decay_steps and stays there."""

    shape: str = "constant"
    decay_steps: int | None = None
    decay_factor: float = 100.0
    warmup_steps: int = 0  # a linear rise to the full rate over this many first steps, multiplying the shape


@dataclass
class TargetConfig:
    """The first evaluation that meets it ends a run; a null value never stops."""

    metric: str = MISSING
    value: float | None = None


@dataclass
class EvaluateConfig:
    """Evaluations fall at multiples of this many fresh examples, the same for every arm."""

    every_fresh_examples: int = MISSING
    batch_size: int = 1000


@dataclass
class TrackingConfig:
    """The mirror of a run outside its folder; it can never stop or slow the run."""

    kind: str = MISSING
    mode: str = "offline"  # offline | online
    project: str = "adaecho"
    entity: str | None = None


@dataclass
class SearchConfig:
    """A quasi-random search per arm: axes and budgets live in the task's YAML, experiments name arms."""

    trials: int = 1  # non-divergent trials per search
    repeats: int = 1  # independent searches per arm
    seed: int = 0
    max_diverged: int | None = None  # diverged trials per search before it gives up; null: 2 * trials
    workers: int = 2  # local processes
    # Stop a trial that has read more fresh examples than the best complete one of its search. It can
    # change how many diverge or miss the target, so an experiment that compares these says needs_every_trial.
    prune: bool = False
    needs_every_trial: bool = False
    allow_changed_code: bool = False  # let a queued job run although the code has changed since
    # key: range in Hydra's sweep grammar, e.g. optimizer.learning_rate: tag(log, interval(0.01, 1))
    axes: dict[str, str] = field(default_factory=dict)
    # name of the arm: its overrides, e.g. batch_e2: [echo=batch, echo.factor=2]
    arms: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Config:
    """One run."""

    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    echo: EchoConfig = field(default_factory=EchoConfig)
    adascale: AdaScaleConfig = field(default_factory=AdaScaleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    seed: int = 0
    batch_size: int = MISSING
    max_steps: int | None = None
    max_fresh_examples: int | None = None
    max_train_time_s: float | None = None
    max_loss: float = 1000.0  # a training loss beyond this, or not finite, ends the run as diverged
    checkpoint_every_s: float = 60.0
    device: str = "auto"
    precision: str = "auto"  # bfloat16 autocast where the processor has it in hardware
    channels_last: bool = False
    threads: int = 1  # of torch on CPU; results repeat bit for bit at equal threads
    fresh: bool = False  # start anew and keep the old folder beside the new one


# Keys that can't change what a run computes up to a given step: they may differ when a run is resumed.
# Budgets are here too: a larger one continues the run.
COUNTED_BUDGETS = ("max_steps", "max_fresh_examples")  # these can only grow: see RunFolder.start
BUDGETS = (*COUNTED_BUDGETS, "max_train_time_s")
_NOT_IDENTITY = ("tracking", "search", "fresh", "checkpoint_every_s", *BUDGETS)
_NOT_IDENTITY_DATA = ("num_workers", "prefetch")


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a plain config that decides a run's trajectory; resuming compares it."""
    kept = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    kept["data"] = {key: value for key, value in config["data"].items() if key not in _NOT_IDENTITY_DATA}
    return kept


def run_id(config: dict[str, Any]) -> str:
    """Ten hex digits that name a run by its identity."""
    canonical = json.dumps(identity(config), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def to_plain(config: DictConfig | Config) -> dict[str, Any]:
    """A composed config as plain dicts, lists and numbers, without Hydra's own node.

    Raises:
        ConfigError: a key was added (``+key=``) that the schema doesn't have, and nothing would read.
    """
    if isinstance(config, Config):
        return asdict(config)
    added = sorted(str(key) for key in config if key not in Config.__dataclass_fields__ and key != "hydra")
    if added:
        raise ConfigError(f"{', '.join(added)}: there is no such key; `--cfg job` prints those there are")
    node = OmegaConf.masked_copy(config, [*Config.__dataclass_fields__])
    plain = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def from_plain(plain: dict[str, Any]) -> Config:
    """A validated ``Config`` from plain values, e.g. a run folder's ``config.yaml``.

    Raises:
        ConfigError: a key is unknown, of the wrong type, or its value can't be.
    """
    try:
        config = OmegaConf.to_object(OmegaConf.merge(_schema(), plain))
    except Exception as error:
        raise ConfigError(f"config: {error}") from error
    assert isinstance(config, Config)
    validate(config)
    return config


@functools.cache  # building the node takes longer than filling it, and a sweep's worker fills one per trial
def _schema() -> DictConfig:
    node: DictConfig = OmegaConf.structured(Config)
    return node


def load(path: Path) -> Config:
    """A validated ``Config`` from a YAML file."""
    return from_plain(OmegaConf.to_container(OmegaConf.load(path), resolve=True))  # type: ignore[arg-type]


def _resolve_run_id(*, _root_: DictConfig) -> str:
    return run_id(to_plain(_root_))


def register() -> None:
    """Make the schema and the resolvers of ``conf/config.yaml`` known to Hydra."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("adaecho.run_id", _resolve_run_id, replace=True)
    OmegaConf.register_new_resolver("adaecho.name_or", lambda name, other: name or other, replace=True)


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
