"""The typed config of a run, as dataclasses.

Hydra composes the config from the YAML files in ``conf/`` and from the user's overrides, and checks names and
types against these dataclasses. ``validate`` checks the values. The comments on the fields are published in
docs/configuration.md.
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
    """Where the data is, how it is split, and how it is read."""

    path: str | None = None  # a folder, file, Hugging Face id or url; null: the task's built-in data
    # number of training examples to hold out for validation; null: the data has its own validation split
    validation_examples: int | None = None
    split_seed: int = 0  # seed for choosing the held-out examples
    # order of examples in an epoch: permutation, shards or sequential; iterable data keeps its own order
    order: str = "permutation"
    # number of workers that read, decode and augment examples; 0: the training thread does all of this
    num_workers: int = 0
    # whether workers are processes even for code marked as thread_safe, for which threads would suffice
    processes: bool = False
    prefetch: int | None = None  # number of batches to read ahead of the echo stage; null: two per worker
    allow_changed: bool = False  # whether a run may be resumed after its data files have changed
    # maximum number of undecodable examples to skip and list; one more is an error
    max_bad_examples: int = 0


@dataclass
class EchoConfig:
    """Data echoing: what is repeated, and how often (paper, section 2)."""

    # what is repeated: none, batch, example_before_augmentation or example_after_augmentation
    variant: str = MISSING
    # how many times each item is used: a number of at least 1, or "auto" to adapt it during training to the
    # measured R, the time to produce a fresh batch divided by the time of a training step
    factor: Any = MISSING
    shuffle_buffer: int = MISSING  # size of the shuffle buffer for examples, in examples
    # size of the shuffle buffer after batch echoing, in batches (paper, Fig. 7a); 0: no buffer
    batch_shuffle_buffer: int = 0
    max_factor: float = 16.0  # upper bound on the factor if factor=auto
    # how the shuffle buffer stores examples: auto, decoded or encoded; this does not change the batches
    buffer_format: str = "auto"
    # whether to echo between two parts of the augmentation, so that each repeat reuses the first part and
    # only the second is applied again; the task must define both parts
    split_augmentation: bool = False


@dataclass
class AdaScaleConfig:
    """AdaScale, which adapts the learning rate to the batch size. See ``adaecho.AdaScale`` for details.

    Each rank splits its batch into ``num_gradients_to_accumulate`` micro-batches. Choose a learning rate and
    a schedule that suit one micro-batch per step. AdaScale adapts them to the whole batch of all ranks.
    """

    enabled: bool = MISSING  # whether to use AdaScale; set by adascale=on, measure or off
    # how AdaScale's gain changes the learning rate: gain multiplies the rate by the gain, sqrt_gain
    # multiplies it by the square root of the gain (for Adam), and measure leaves it unchanged
    rule: str = "gain"
    num_gradients_to_accumulate: int = 1  # number of micro-batches per step
    scale: float | None = None  # number of base batches per step; null: one per micro-batch
    # decay rate theta of the moving averages, in [0, 1); null: chosen to average over about 1000 base batches
    smoothing: float | None = None
    # whether to correct the initial bias of the moving averages; false: as in appendix B.3 of the AdaScale
    # paper
    debias_ewma: bool = True
    # number of scale-invariant steps (sum of the gains) after which the run stops (Algorithm 2 of the
    # AdaScale paper); null: no limit
    total_steps: float | None = None


@dataclass
class OptimizerConfig:
    """The optimizer: SGD with Nesterov or heavy-ball momentum, as in the paper, or Adam or AdamW."""

    # learning rate before the schedule and AdaScale adjust it
    learning_rate: float = MISSING
    momentum: float = MISSING  # momentum of sgd
    nesterov: bool = MISSING  # whether sgd uses Nesterov momentum; false: heavy-ball momentum
    # weight decay, which is decoupled for adamw and added to the gradient for the other optimizers
    weight_decay: float = 0.0
    name: str = "sgd"  # sgd, adam or adamw
    beta1: float = 0.9  # decay rate of the first moment in adam and adamw
    beta2: float = 0.999  # decay rate of the second moment in adam and adamw
    epsilon: float = 1e-8  # constant added to the denominator in adam and adamw
    # whether weight decay also applies to norm layers and biases; false: only to parameters with at least two
    # dimensions
    decay_norms_and_biases: bool = True
    max_grad_norm: float | None = None  # larger gradients are clipped to this norm; null: no clipping
    fused: bool = False  # whether to use torch's fused kernel
    zero_redundancy: bool = False  # whether to shard the optimizer state over ranks (ZeRO stage 1)
    # decay rate of an exponential moving average of the weights, which is evaluated and saved in their place;
    # null: no average
    ema_decay: float | None = None


@dataclass
class ScheduleConfig:
    """The learning-rate schedule. Each duration can be given either in steps or in epochs."""

    shape: str = "constant"  # constant, linear_decay, cosine or step_decay
    # duration of linear_decay and cosine; after that, the learning rate stays constant
    decay_steps: int | None = None
    decay_factor: float = 100.0  # linear_decay and cosine end at learning_rate / decay_factor
    # duration of a linear warmup, which multiplies the shape by a factor that rises to 1
    warmup_steps: int = 0
    decay_epochs: float | None = None  # decay_steps in epochs; give only one of the two
    warmup_epochs: float | None = None  # warmup_steps in epochs; give only one of the two
    # the step at which step_decay first divides the learning rate by milestone_factor
    first_milestone_steps: int | None = None
    first_milestone_epochs: float | None = None  # first_milestone_steps in epochs; give only one of the two
    # number of steps until step_decay divides the learning rate again; null: it does so only once
    milestone_gap_steps: int | None = None
    milestone_gap_epochs: float | None = None  # milestone_gap_steps in epochs; give only one of the two
    milestone_factor: float = 10.0  # number by which step_decay divides the learning rate at each milestone
    # what advances the schedule: steps (optimizer steps), or fresh_examples, where batch_size fresh examples
    # count as one step and repeats do not count; warmup always counts optimizer steps
    unit: str = "steps"


@dataclass
class TargetConfig:
    """The target value of a metric. A run ends when it reaches the target."""

    metric: str = MISSING  # name of a metric of the task
    value: float | None = None  # value at which the run ends; null: the run spends its whole budget
    # number of consecutive evaluations that must meet the target; the cost is measured at the last one
    consecutive: int = 1
    # value of the metric for random guessing; a run that is no better than this after chance_share of
    # max_fresh_examples counts as diverged; null: only the loss can make a run diverge (see max_loss)
    chance_level: float | None = None
    # fraction of max_fresh_examples, in (0, 1], after which a run must be better than chance_level
    chance_share: float = 0.5


@dataclass
class EvaluateConfig:
    """How often the model is evaluated, and on how many validation examples."""

    # number of fresh examples between two evaluations; must be equal in all arms of a sweep
    every_fresh_examples: int = MISSING
    batch_size: int = 1000  # batch size used for evaluation
    max_examples: int | None = None  # maximum number of validation examples to evaluate; null: all


@dataclass
class TrackingConfig:
    """Copies of the records in Weights & Biases (W&B). A failure of W&B cannot stop or slow the run."""

    kind: str = MISSING  # none or wandb
    mode: str = "offline"  # offline, which writes files for `wandb sync`, or online
    project: str = "adaecho"  # name of the W&B project
    entity: str | None = None  # name of the W&B entity; null: your default entity


@dataclass
class SearchConfig:
    """Settings of sweeps, which compare several configurations (arms).

    An experiment lists the arms. For each arm, a search can look for the best hyperparameters, within ranges
    that the task defines.
    """

    # number of non-divergent trials per search; 1: no search, so each arm runs once with the task's values
    trials: int = 1
    repeats: int = 1  # number of independent searches per arm
    seed: int = 0  # seed from which the hyperparameters and seeds of all trials are derived
    # maximum number of diverged trials that a search replaces with new trials; null: 2 * trials
    max_diverged: int | None = None
    workers: int = 2  # number of local worker processes
    # whether to stop a trial once it has read more fresh examples than the best trial of its search needed
    # to reach the target; this changes how many trials diverge or miss the target
    prune: bool = False
    # ranges to search, as key: range in Hydra's sweep grammar, for example
    # optimizer.learning_rate: tag(log, interval(0.01, 1)); used only if trials > 1
    axes: dict[str, str] = field(default_factory=dict)
    # arms to compare, as name: overrides, for example batch_e2: [echo=batch, echo.factor=2]
    arms: dict[str, list[str]] = field(default_factory=dict)
    # baselines, as arm: baseline; by default, an arm is compared with the arm without echoing that has the
    # same batch size and shuffle buffer
    baselines: dict[str, str] = field(default_factory=dict)


@dataclass
class Config:
    """The config of one run. The top-level keys apply to the run as a whole."""

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
    # modules to call at each evaluation and at the end of the run, for example [my_callbacks]; see
    # docs/your-own.md
    callbacks: list[str] = field(default_factory=list)
    seed: int = 0  # seed of the initial weights, data order, echoing and augmentation
    batch_size: int = MISSING  # number of examples per step
    max_steps: int | None = None  # maximum number of optimizer steps; null: no limit
    # maximum number of fresh examples, that is, examples read, not counting repeats; null: no limit
    max_fresh_examples: int | None = None
    max_train_time_s: float | None = None  # maximum training time in seconds; null: no limit
    # a run with a larger or non-finite training loss is stopped and counts as diverged
    max_loss: float = 1000.0
    checkpoint_every_s: float = 60.0  # time in seconds between two checkpoints
    device: str = "auto"  # auto, cpu or cuda
    # auto, float32 or bfloat16; auto uses bfloat16 autocast if the hardware supports it
    precision: str = "auto"
    channels_last: bool = False  # whether the model uses torch's channels_last memory format
    # mode of torch.compile for the model: off, default or reduce-overhead, which uses CUDA graphs
    compile: str = "off"
    rank_timeout_s: float = 600.0  # time in seconds that a rank waits for another before it fails
    threads: int = 1  # number of CPU threads for torch; results are identical only with the same number
    restart: bool = False  # whether to start over; an existing run folder is kept under another name


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
    """Convert a composed config to plain dicts, lists and numbers, without Hydra's own settings."""
    if isinstance(config, Config):
        return asdict(config)
    added = sorted(str(key) for key in config if key not in Config.__dataclass_fields__ and key != "hydra")
    if added:
        raise ConfigError(f"{', '.join(added)}: unknown key; `--cfg job` prints all keys")
    node = OmegaConf.masked_copy(config, [*Config.__dataclass_fields__])
    plain: Any = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return dict(plain)


def from_plain(plain: dict[str, Any]) -> Config:
    """Build and validate a ``Config`` from plain values, such as the content of ``config.yaml``."""
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


@functools.cache  # creating the schema takes longer than merging values into it
def _schema() -> DictConfig:
    node: DictConfig = OmegaConf.structured(Config)
    return node


def register() -> None:
    """Register the schema with Hydra, and the resolvers that the YAML files in ``conf/`` use."""
    ConfigStore.instance().store(name="schema", node=Config)
    resolvers: dict[str, Callable[..., Any]] = {
        "adaecho.run_id": lambda *, _root_: run_id(to_plain(_root_)),
        "adaecho.name_or": lambda name, other: name or other,
        "adaecho.scaled": size_defaults.scaled,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def value_at(tree: Any, key: str) -> Any:
    """Return the value at a dotted key, such as ``echo.factor``, of a config or of plain dicts."""
    for name in key.split("."):
        fields = tree if isinstance(tree, dict) else getattr(tree, "__dataclass_fields__", ())
        if name not in fields:
            raise ConfigError(f"{key}: unknown key")
        tree = tree[name] if isinstance(tree, dict) else getattr(tree, name)
    return tree


def validate(config: Config) -> None:
    """Check the ranges, choices and combinations of all values."""
    if config.data.path == "":  # often caused by an unset shell variable
        raise ConfigError("data.path: is empty; set a path, Hub dataset ID or URL, or null for built-in data")
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
            f"target.value={config.target.value:g}: accuracy is a fraction; 97% is target.value=0.97"
        )
    if config.target.chance_level is not None and config.max_fresh_examples is None:
        raise ConfigError("target.chance_level: needs max_fresh_examples, which is null")
    if config.adascale.enabled:
        _validate_adascale(config)


def check_schedule(schedule: ScheduleConfig) -> None:
    """Check that no duration is missing or given in both steps and epochs."""
    for name in ("decay", "warmup", "first_milestone", "milestone_gap"):
        steps, epochs = getattr(schedule, f"{name}_steps"), getattr(schedule, f"{name}_epochs")
        if steps and epochs is not None:
            raise ConfigError(
                f"schedule.{name}_steps={steps} and schedule.{name}_epochs={epochs}: set only one of the two"
            )
        if name == _DURATIONS.get(schedule.shape) and not (steps or epochs):
            raise ConfigError(
                f"schedule.{name}_steps={steps}: schedule.shape={schedule.shape} needs a positive number of "
                f"steps, or schedule.{name}_epochs"
            )


def _validate_adascale(config: Config) -> None:
    """Reject settings that would make AdaScale compute a wrong gain or learning rate."""
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
