"""The typed config tree: the schema that ``conf/`` fills and every override is checked against.

Types catch typos and wrong kinds at composition, ``checks`` what a type can't say. ``run_id`` names a
run folder by what can change its trajectory and by nothing else.
"""

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from adaecho.errors import ConfigError


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
    stop_hopeless: bool = False
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
    from adaecho.config.checks import validate  # which needs this module's classes

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
