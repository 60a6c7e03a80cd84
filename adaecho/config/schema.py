"""The typed config of a run. ``conf/`` fills it, and every override is checked against it.

Hydra checks names and types. ``validate`` checks ranges, choices and combinations.
"""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from adaecho.config import size_defaults
from adaecho.config.identity import run_id
from adaecho.config.launch_env import launched_ranks
from adaecho.config.tasks import callback_path, check_options
from adaecho.config.validation import one_of, within
from adaecho.echo.variants import BUFFER_FORMATS, ORDERS, VARIANTS, check_factor
from adaecho.errors import ConfigError


@dataclass
class DataConfig:
    """The training data and its split."""

    path: str | None = None  # folder, file, hub id or url; null: the task has its own data
    # size of the validation split that is taken from the training files; null: the data has its own split
    validation_examples: int | None = None
    split_seed: int = 0  # seed of the split
    order: str = "permutation"  # permutation | shards | sequential; iterable data keeps its own order
    num_workers: int = 0  # workers that read, decode and augment; 0: the training thread does
    processes: bool = False  # use worker processes even for code that declares thread_safe
    prefetch: int | None = None  # batches read ahead of the echo stage; null: two per worker
    allow_changed: bool = False  # resume although the data files have changed
    max_bad_examples: int = 0  # undecodable examples to skip and list before the run fails


@dataclass
class EchoConfig:
    """Which items are repeated, and how often (paper, section 2)."""

    variant: str = MISSING  # none | batch | example_before_augmentation | example_after_augmentation
    factor: Any = MISSING  # a number >= 1, or "auto" to follow the measured R
    shuffle_buffer: int = MISSING  # size in examples
    batch_shuffle_buffer: int = 0  # size in batches, after batch echoing (paper, Fig. 7a)
    max_factor: float = 16.0  # upper bound of factor=auto
    buffer_format: str = "auto"  # auto | decoded | encoded; does not change the batches
    split_augmentation: bool = False  # echo between the two parts of the augmentation, if the task names two


@dataclass
class AdaScaleConfig:
    """AdaScale around the optimizer. ``adaecho.AdaScale`` documents the arguments.

    A batch is split into ``num_gradients_to_accumulate`` micro-batches. Learning rate and schedule are those
    of one micro-batch, unless ``scale`` is given.
    """

    enabled: bool = MISSING  # set by adascale=on, measure or off
    rule: str = "gain"  # gain: lr * gain | sqrt_gain: lr * sqrt(gain), for Adam | measure: lr
    num_gradients_to_accumulate: int = 1  # micro-batches per step
    scale: float | None = None  # base batches per step; null: one per micro-batch
    smoothing: float | None = None  # theta of the averages, in [0, 1); null: 1000 base batches
    debias_ewma: bool = True  # false: averages as in the paper's appendix B.3
    total_steps: float | None = None  # stop when the scale-invariant steps reach it (Algorithm 2)


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
    max_grad_norm: float | None = None  # maximum norm of the gradient; null: no clipping
    fused: bool = False  # torch's fused kernel
    zero_redundancy: bool = False  # shard the optimizer state over ranks (ZeRO stage 1)
    # decay of an exponential moving average of the weights, which is then evaluated and saved; null: off
    ema_decay: float | None = None


@dataclass
class ScheduleConfig:
    """Learning-rate schedule. Durations are given in steps or in epochs."""

    shape: str = "constant"  # constant | linear_decay | cosine | step_decay
    decay_steps: int | None = None  # duration of linear_decay and cosine; constant afterwards
    decay_factor: float = 100.0  # final learning rate is learning_rate / decay_factor
    warmup_steps: int = 0  # linear warmup, multiplied with the shape
    decay_epochs: float | None = None  # instead of decay_steps
    warmup_epochs: float | None = None  # instead of warmup_steps
    # step_decay: divide the learning rate by milestone_factor here, and again after milestone_gap_steps
    first_milestone_steps: int | None = None
    first_milestone_epochs: float | None = None  # instead of first_milestone_steps
    milestone_gap_steps: int | None = None  # null: only one milestone
    milestone_gap_epochs: float | None = None  # instead of milestone_gap_steps
    milestone_factor: float = 10.0  # divisor at each milestone
    # unit of the schedule: steps (optimizer steps) | fresh_examples (batch_size fresh examples are one step,
    # so repeats do not advance the schedule); warmup always counts optimizer steps
    unit: str = "steps"


@dataclass
class TargetConfig:
    """The target that ends a run."""

    metric: str = MISSING  # a metric of the task
    value: float | None = None  # the first evaluation that meets it ends the run; null: never
    consecutive: int = 1  # consecutive evaluations that must meet it; the last one gives the cost
    # metric of random guessing: a run that is not better after chance_share of max_fresh_examples has
    # diverged; null: only the loss decides (max_loss)
    chance_level: float | None = None
    chance_share: float = 0.5  # fraction of max_fresh_examples, in (0, 1]


@dataclass
class EvaluateConfig:
    """Evaluations on the validation split."""

    every_fresh_examples: int = MISSING  # evaluate at multiples of this, equally for all arms
    batch_size: int = 1000  # batch size of an evaluation
    max_examples: int | None = None  # use only so many validation examples; null: all


@dataclass
class TrackingConfig:
    """Mirror of the run folder in Weights & Biases. It cannot stop or slow the run."""

    kind: str = MISSING  # none | wandb
    mode: str = "offline"  # offline | online
    project: str = "adaecho"  # W&B project
    entity: str | None = None  # W&B entity; null: your default


@dataclass
class SearchConfig:
    """Quasi-random search of each arm. Tasks define axes and budgets, experiments define arms."""

    trials: int = 1  # non-divergent trials per search; 1: each arm runs at the values of the task
    repeats: int = 1  # independent searches per arm
    seed: int = 0  # seeds the points and the trials
    max_diverged: int | None = None  # diverged trials per search that are replaced; null: 2 * trials
    workers: int = 2  # local processes
    # stop a trial that has read more fresh examples than the best finished one of its search; this changes
    # how many trials diverge or miss the target
    prune: bool = False
    # key: range in Hydra's sweep grammar, e.g. optimizer.learning_rate: tag(log, interval(0.01, 1)); used if
    # trials > 1
    axes: dict[str, str] = field(default_factory=dict)
    # name: overrides, e.g. batch_e2: [echo=batch, echo.factor=2]
    arms: dict[str, list[str]] = field(default_factory=dict)
    # name of an arm: name of its baseline; default: the arm without echoing of the same batch size and buffer
    baselines: dict[str, str] = field(default_factory=dict)


@dataclass
class Config:
    """Config of one run."""

    task: Any = field(default_factory=lambda: {"name": MISSING})  # a TaskConfig after from_plain()
    data: DataConfig = field(default_factory=DataConfig)
    echo: EchoConfig = field(default_factory=EchoConfig)
    adascale: AdaScaleConfig = field(default_factory=AdaScaleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    # modules called at each evaluation and at the end, e.g. [my_callbacks]; see docs/your-own.md
    callbacks: list[str] = field(default_factory=list)
    seed: int = 0  # seeds weights, order, echo and augmentation
    batch_size: int = MISSING  # examples per step
    max_steps: int | None = None  # limit of optimizer steps; null: none
    max_fresh_examples: int | None = None  # limit of examples read; null: none
    max_train_time_s: float | None = None  # limit of training time in seconds; null: none
    max_loss: float = 1000.0  # a larger or non-finite training loss ends the run as diverged
    checkpoint_every_s: float = 60.0  # seconds between checkpoints
    device: str = "auto"  # auto | cpu | cuda
    precision: str = "auto"  # auto | float32 | bfloat16; auto: bfloat16 autocast if the hardware has it
    channels_last: bool = False  # memory format of the model
    compile: str = "off"  # off | default | reduce-overhead (CUDA graphs): torch.compile of the model
    rank_timeout_s: float = 600.0  # ranks that wait longer for each other fail
    threads: int = 1  # CPU threads of torch; equal numbers give identical results
    restart: bool = False  # start over; the old folder is kept under another name


_CHOICES = {
    "echo.variant": tuple(VARIANTS),
    "echo.buffer_format": BUFFER_FORMATS,
    "data.order": ORDERS,
    "optimizer.name": ("sgd", "adam", "adamw"),
    "schedule.shape": ("constant", "linear_decay", "cosine", "step_decay"),
    "schedule.unit": ("steps", "fresh_examples"),
    "adascale.rule": ("gain", "sqrt_gain", "measure"),
    "precision": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "compile": ("off", "default", "reduce-overhead"),
    "tracking.kind": ("none", "wandb"),
    "tracking.mode": ("offline", "online"),
}
_DURATIONS = {"linear_decay": "decay", "cosine": "decay", "step_decay": "first_milestone"}
_RANGES = {
    "[1, 1024]": "threads",
    "[1, inf)": """batch_size echo.shuffle_buffer target.consecutive evaluate.every_fresh_examples
        evaluate.batch_size evaluate.max_examples data.validation_examples search.trials search.repeats
        search.workers adascale.num_gradients_to_accumulate rank_timeout_s schedule.decay_factor
        schedule.milestone_factor""",
    "[0, 9e15]": "seed search.seed data.split_seed",
    "[0, inf)": """echo.batch_shuffle_buffer data.num_workers data.prefetch data.max_bad_examples
        search.max_diverged checkpoint_every_s optimizer.weight_decay
        schedule.decay_steps schedule.warmup_steps schedule.first_milestone_steps
        schedule.milestone_gap_steps""",
    "(0, inf)": """max_steps max_fresh_examples max_train_time_s optimizer.learning_rate optimizer.epsilon
        optimizer.max_grad_norm adascale.total_steps schedule.decay_epochs schedule.warmup_epochs
        schedule.first_milestone_epochs schedule.milestone_gap_epochs""",
    "(0, inf]": "max_loss",
    "[0, 1)": "optimizer.momentum optimizer.beta1 optimizer.beta2 optimizer.ema_decay",
    "(0, 1]": "target.chance_share",
    "(-inf, inf)": "target.value",
}


def to_plain(config: DictConfig | Config) -> dict[str, Any]:
    """Return a composed config as plain dicts, lists and numbers, without Hydra's node.

    Raises:
        ConfigError: a key was added (``+key=``) that the schema does not have.
    """
    if isinstance(config, Config):
        return asdict(config)
    added = sorted(str(key) for key in config if key not in Config.__dataclass_fields__ and key != "hydra")
    if added:
        raise ConfigError(f"{', '.join(added)}: unknown key; `--cfg job` prints all keys")
    node = OmegaConf.masked_copy(config, [*Config.__dataclass_fields__])
    plain: Any = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return dict(plain)


def from_plain(plain: dict[str, Any]) -> Config:
    """Return a validated ``Config`` from a composed config or from the ``config.yaml`` of a run.

    Raises:
        ConfigError: a key is unknown, or its value has the wrong type or is out of range.
    """
    without_task: Any = {**plain, "task": {"name": ""}}
    try:
        config: Any = OmegaConf.to_object(OmegaConf.merge(_schema(), without_task))
    except Exception as error:
        raise ConfigError(f"config: {error}") from error
    task = plain.get("task", {})
    config.task = check_options(task)
    for name in config.callbacks:
        callback_path(name)
    validate(config)
    return config  # type: ignore[no-any-return]


@functools.cache  # building the node takes longer than filling it
def _schema() -> DictConfig:
    node: DictConfig = OmegaConf.structured(Config)
    return node


def register() -> None:
    """Register the schema and the resolvers of ``conf/config.yaml`` with Hydra."""
    ConfigStore.instance().store(name="schema", node=Config)
    resolvers: dict[str, Callable[..., Any]] = {
        "adaecho.run_id": lambda *, _root_: run_id(to_plain(_root_)),
        "adaecho.name_or": lambda name, other: name or other,
        "adaecho.scaled": size_defaults.scaled,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def value_at(tree: Any, key: str) -> Any:
    """Return the value at a dotted key of a config or of plain dicts.

    Raises:
        ConfigError: the key is unknown.
    """
    for name in key.split("."):
        fields = tree if isinstance(tree, dict) else getattr(tree, "__dataclass_fields__", ())
        if name not in fields:
            raise ConfigError(f"{key}: unknown key")
        tree = tree[name] if isinstance(tree, dict) else getattr(tree, name)
    return tree


def validate(config: Config) -> None:
    """Check ranges, choices and combinations.

    Raises:
        ConfigError: names the key, its value, the reason and the remedy.
    """
    if config.data.path == "":  # an unset shell variable
        raise ConfigError("data.path: is empty; give a path, a hub id or a url, or null for built-in data")
    for key, allowed in _CHOICES.items():
        one_of(key, value_at(config, key), allowed)
    for interval, keys in _RANGES.items():
        for key in keys.split():
            within(key, value_at(config, key), interval)
    try:
        echo = config.echo
        check_factor(VARIANTS[echo.variant], echo.factor, echo.max_factor, echo.batch_shuffle_buffer)
    except ValueError as error:
        raise ConfigError(f"echo.{error}") from None
    if config.echo.split_augmentation and config.echo.variant != "example_before_augmentation":
        raise ConfigError("echo.split_augmentation=true: needs echo=example_before_augmentation")
    check_schedule(config.schedule)
    if config.target.metric == "accuracy" and (config.target.value or 0.0) > 1:
        raise ConfigError(
            f"target.value={config.target.value:g}: accuracy is a fraction; 97 % is target.value=0.97"
        )
    if config.target.chance_level is not None and config.max_fresh_examples is None:
        raise ConfigError("target.chance_level: needs max_fresh_examples, which is null")
    if config.adascale.enabled:
        _validate_adascale(config)


def check_schedule(schedule: ScheduleConfig) -> None:
    """Check that each duration is given at most once, and that the shape has the one it needs."""
    for name in ("decay", "warmup", "first_milestone", "milestone_gap"):
        steps, epochs = getattr(schedule, f"{name}_steps"), getattr(schedule, f"{name}_epochs")
        if steps and epochs is not None:
            raise ConfigError(
                f"schedule.{name}_steps={steps} and schedule.{name}_epochs={epochs}: give one of the two"
            )
        if name == _DURATIONS.get(schedule.shape) and not (steps or epochs):
            raise ConfigError(
                f"schedule.{name}_steps={steps}: schedule.shape={schedule.shape} needs a positive number of "
                f"steps, or schedule.{name}_epochs"
            )


def _validate_adascale(config: Config) -> None:
    """Refuse settings that make the gain, or the learning rate scaled by it, wrong."""
    adascale, name = config.adascale, config.optimizer.name
    count = adascale.num_gradients_to_accumulate
    if config.batch_size % count:
        raise ConfigError(
            f"batch_size={config.batch_size}: must be a multiple of "
            f"adascale.num_gradients_to_accumulate={count}"
        )
    instead = "use adascale=measure, which only measures the gain, or adascale=off"
    changes_rate = adascale.rule != "measure"
    if changes_rate and (adascale.rule == "gain") != (name == "sgd"):
        fitting = "gain" if name == "sgd" else "sqrt_gain"
        raise ConfigError(
            f"optimizer.name={name}: needs adascale.rule={fitting}, not {adascale.rule}; or {instead}"
        )
    if changes_rate and config.schedule.unit != "steps":
        raise ConfigError(
            f"schedule.unit={config.schedule.unit}: AdaScale's schedule counts scale-invariant steps; "
            f"use schedule.unit=steps, or {instead}"
        )
    if count == 1 and launched_ranks() == 1:
        raise ConfigError(
            "adascale.num_gradients_to_accumulate=1: one process needs at least 2 micro-batches per step to "
            "measure the gradient variance"
        )
