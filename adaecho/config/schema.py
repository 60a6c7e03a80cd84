"""The typed config tree: the schema that ``conf/`` fills and every override is checked against.

Types catch typos and wrong kinds at composition, ``validate`` what a type can't say.
"""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from adaecho.config import scale
from adaecho.config.bounds import one_of, within
from adaecho.config.identity import run_id
from adaecho.config.launched import launched_ranks
from adaecho.config.optimization import (
    COUNTS,
    OPTIMIZERS,
    SCHEDULES,
    OptimizerConfig,
    ScheduleConfig,
    check_schedule,
)
from adaecho.config.tasks import callback_path, check_options
from adaecho.echo.variants import ORDERS, PLACES, VARIANTS, check_factor
from adaecho.errors import ConfigError

ADASCALE_RULES = ("gain", "sqrt_gain", "measure")
DEVICES = ("auto", "cpu", "cuda")


@dataclass
class DataConfig:
    """Where training examples come from and how they are split."""

    path: str | None = None  # folder, file, hub id or url; null where the task embeds its data
    # Held out of the training files, by a permutation seeded with split_seed; null where the data has a
    # validation split of its own.
    validation_examples: int | None = None
    split_seed: int = 0  # of that permutation
    order: str = "permutation"  # permutation | shards | stored; what is only iterated has an order of its own
    num_workers: int = 0  # that read, decode and augment, as EchoLoader's; 0: in the training thread
    processes: bool = False  # in any case: for Python that holds the interpreter's lock
    prefetch: int | None = None  # batches read ahead of the echo stage; null: two for each worker
    allow_changed: bool = False  # continue a run although the files of its data have changed since
    max_bad_examples: int = 0  # undecodable examples to skip (and list) before the run stops


@dataclass
class EchoConfig:
    """Which part of the pipeline is repeated, and how often (paper, section 2)."""

    variant: str = MISSING  # none | batch | example_before_augmentation | example_after_augmentation
    factor: Any = MISSING  # a number >= 1, or "auto": follow the measured R
    shuffle_buffer: int = MISSING  # examples
    batch_shuffle_buffer: int = 0  # batches, after batch echoing (paper, Fig. 7a)
    max_factor: float = 16.0  # bound of factor=auto
    place: str = "auto"  # auto | decoded | encoded: what the buffer holds; same batches
    split: bool = False  # echo before augmentation, but for its first part, of tasks that name two


@dataclass
class AdaScaleConfig:
    """AdaScale around the optimizer; see ``adaecho.AdaScale`` for the arguments.

    A step's batch is dealt to ``num_gradients_to_accumulate`` micro-batches, each the base batch that the
    learning rate and its schedule are meant for (unless ``scale`` says otherwise).
    """

    enabled: bool = MISSING  # adascale=on, measure or off
    rule: str = "gain"  # lr times the gain; sqrt_gain: times its root (Adam); measure: only read the gain
    num_gradients_to_accumulate: int = 1  # micro-batches of a step
    scale: float | None = None  # base batches that a step averages; null: one for each micro-batch
    smoothing: float | None = None  # theta of the averages, in [0, 1); null: over 1000 base batches
    debias_ewma: bool = True  # false: the averages of the paper's appendix B.3
    total_steps: float | None = None  # stop when the scale-invariant steps reach it (Algorithm 2)


@dataclass
class TargetConfig:
    """What ends a run: the first evaluation that meets it, or so many in a row; a null value never stops."""

    metric: str = MISSING  # one that the task reports
    value: float | None = None  # the first evaluation that meets it ends the run; null never stops
    in_a_row: int = 1  # evaluations that must meet it one after the other; the cost is read off at the last
    # What guessing would give. A run whose best evaluation is no better once it has read chance_share of
    # max_fresh_examples has diverged, in every arm alike; null: only its loss can tell (max_loss).
    chance: float | None = None
    chance_share: float = 0.5  # of max_fresh_examples, above 0 and at most 1


@dataclass
class EvaluateConfig:
    """Evaluations fall at multiples of this many fresh examples, the same for every arm."""

    every_fresh_examples: int = MISSING  # between two evaluations, the same for every arm
    batch_size: int = 1000  # of the validation split
    max_examples: int | None = None  # of the validation split, imagenet's drawn, else the first; null: all


@dataclass
class TrackingConfig:
    """The mirror of a run outside its folder; it can never stop or slow the run."""

    kind: str = MISSING  # none | wandb
    mode: str = "offline"  # of Weights & Biases: offline | online
    project: str = "adaecho"  # of Weights & Biases
    entity: str | None = None  # of Weights & Biases; null: your default


@dataclass
class SearchConfig:
    """A quasi-random search per arm: axes and budgets live in the task's YAML, experiments name arms."""

    trials: int = 1  # non-divergent trials per search; of 1, arms run at the task's own values
    repeats: int = 1  # independent searches per arm
    seed: int = 0  # of the points and of the trials' own seeds
    max_diverged: int | None = None  # diverged trials per search before it gives up; null: 2 * trials
    workers: int = 2  # local processes
    # Stop a trial that has read more fresh examples than the best complete one of its search. It can
    # change how many diverge or miss the target: not for an experiment that compares these.
    prune: bool = False
    # key: range in Hydra's sweep grammar, e.g. optimizer.learning_rate: tag(log, interval(0.01, 1)); the
    # task's are searched where trials > 1
    axes: dict[str, str] = field(default_factory=dict)
    # name of the arm: its overrides, e.g. batch_e2: [echo=batch, echo.factor=2]
    arms: dict[str, list[str]] = field(default_factory=dict)
    # name of an arm: name of the one it is compared with, where that is not plain (see records/outcome.py)
    baselines: dict[str, str] = field(default_factory=dict)


@dataclass
class Config:
    """One run."""

    task: Any = field(default_factory=lambda: {"name": MISSING})  # a TaskConfig once it has been checked
    data: DataConfig = field(default_factory=DataConfig)
    echo: EchoConfig = field(default_factory=EchoConfig)
    adascale: AdaScaleConfig = field(default_factory=AdaScaleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    # modules that are told of each evaluation and of the end, e.g. [my_callbacks]; docs/your-own.md
    callbacks: list[str] = field(default_factory=list)
    seed: int = 0  # of weights, order, echo and augmentation
    batch_size: int = MISSING  # examples of a step
    max_steps: int | None = None  # SGD updates; null: no limit
    max_fresh_examples: int | None = None  # examples read; null: no limit
    max_train_time_s: float | None = None  # without evaluation and checkpoints; null: no limit
    max_loss: float = 1000.0  # a training loss beyond this, or not finite, ends the run as diverged
    checkpoint_every_s: float = 60.0  # seconds of work that a kill can cost
    device: str = "auto"  # auto | cpu | cuda
    precision: str = "auto"  # bfloat16 autocast where the processor has it in hardware
    channels_last: bool = False  # memory format of the model
    compile: str = "off"  # off | default | reduce-overhead (CUDA graphs): torch.compile of the model
    rank_timeout_s: float = 600.0  # how long the ranks of a run wait for one another before it fails
    threads: int = 1  # of torch on CPU; results repeat bit for bit at equal threads
    fresh: bool = False  # start anew and keep the old folder beside the new one


_CHOICES = {
    "echo.variant": tuple(VARIANTS),
    "echo.place": PLACES,
    "data.order": ORDERS,
    "optimizer.name": OPTIMIZERS,
    "schedule.shape": SCHEDULES,
    "schedule.counts": COUNTS,
    "adascale.rule": ADASCALE_RULES,
    "precision": ("auto", "float32", "bfloat16"),
    "device": DEVICES,
    "compile": ("off", "default", "reduce-overhead"),
    "tracking.kind": ("none", "wandb"),
    "tracking.mode": ("offline", "online"),
}
_RANGES = {
    "[1, 1024]": "threads",
    "[1, inf)": """batch_size echo.shuffle_buffer target.in_a_row evaluate.every_fresh_examples
        evaluate.batch_size evaluate.max_examples data.validation_examples search.trials search.repeats
        search.workers adascale.num_gradients_to_accumulate rank_timeout_s schedule.decay_factor
        schedule.drop_factor""",
    "[0, 9e15]": "seed search.seed data.split_seed",
    "[0, inf)": """echo.batch_shuffle_buffer data.num_workers data.prefetch data.max_bad_examples
        search.max_diverged checkpoint_every_s optimizer.weight_decay
        schedule.decay_steps schedule.warmup_steps schedule.first_drop_steps schedule.drop_gap_steps""",
    "(0, inf)": """max_steps max_fresh_examples max_train_time_s optimizer.learning_rate optimizer.epsilon
        optimizer.clip_norm adascale.total_steps schedule.decay_epochs schedule.warmup_epochs
        schedule.first_drop_epochs schedule.drop_gap_epochs""",
    "(0, inf]": "max_loss",
    "[0, 1)": "optimizer.momentum optimizer.beta1 optimizer.beta2 optimizer.ema_decay",
    "(0, 1]": "target.chance_share",
    "(-inf, inf)": "target.value",
}


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
    plain: Any = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return dict(plain)


def from_plain(plain: dict[str, Any]) -> Config:
    """A validated ``Config`` from plain values: what was composed, or a run folder's ``config.yaml``.

    Raises:
        ConfigError: a key is unknown, of the wrong type, or its value can't be.
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


@functools.cache  # building the node takes longer than filling it, and a sweep's worker fills one per trial
def _schema() -> DictConfig:
    node: DictConfig = OmegaConf.structured(Config)
    return node


def register() -> None:
    """Make the schema and the resolvers of ``conf/config.yaml`` known to Hydra."""
    ConfigStore.instance().store(name="schema", node=Config)
    resolvers: dict[str, Callable[..., Any]] = {
        "adaecho.run_id": lambda *, _root_: run_id(to_plain(_root_)),
        "adaecho.name_or": lambda name, other: name or other,
        "adaecho.scaled": scale.scaled,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def value_at(tree: Any, key: str) -> Any:
    """What stands at a dotted key of a config or of plain dicts.

    Raises:
        ConfigError: there is no such key.
    """
    for name in key.split("."):
        fields = tree if isinstance(tree, dict) else getattr(tree, "__dataclass_fields__", ())
        if name not in fields:
            raise ConfigError(f"{key}: there is no such key")
        tree = tree[name] if isinstance(tree, dict) else getattr(tree, name)
    return tree


def validate(config: Config) -> None:
    """Check what types can't say.

    Raises:
        ConfigError: naming key, value, reason and remedy.
    """
    if config.data.path == "":  # of a shell's variable that is not set
        raise ConfigError("data.path: is empty; give a path, a hub id or a url, or null for embedded data")
    for key, allowed in _CHOICES.items():
        one_of(key, value_at(config, key), allowed)
    for interval, keys in _RANGES.items():
        for key in keys.split():
            within(key, value_at(config, key), interval)
    for key in config.search.axes:
        value_at(config, key)
    try:
        echo = config.echo
        check_factor(VARIANTS[echo.variant], echo.factor, echo.max_factor, echo.batch_shuffle_buffer)
    except ValueError as error:
        raise ConfigError(f"echo.{error}") from None
    if config.echo.split and config.echo.variant != "example_before_augmentation":
        raise ConfigError("echo.split=true: needs echo=example_before_augmentation; choose it, or drop it")
    optimizer = config.optimizer
    if optimizer.name == "sgd" and optimizer.nesterov and optimizer.momentum == 0:
        raise ConfigError("optimizer.nesterov=true: needs optimizer.momentum > 0")
    check_schedule(config.schedule)
    if config.target.metric == "accuracy" and (config.target.value or 0.0) > 1:
        raise ConfigError(
            f"target.value={config.target.value:g}: accuracy is a fraction; 97 % is target.value=0.97"
        )
    if config.target.chance is not None and config.max_fresh_examples is None:
        raise ConfigError("target.chance: is judged after a share of max_fresh_examples, which is null")
    if config.adascale.enabled:
        _validate_adascale(config)


def _validate_adascale(config: Config) -> None:
    """What would make the gain, or the rate scaled by it, wrong."""
    adascale, name = config.adascale, config.optimizer.name
    count = adascale.num_gradients_to_accumulate
    if config.batch_size % count:
        raise ConfigError(
            f"batch_size={config.batch_size}: must be a multiple of "
            f"adascale.num_gradients_to_accumulate={count}"
        )
    instead = "choose adascale=measure, which only reads the gain, or adascale=off"
    if adascale.rule == "measure":
        if adascale.total_steps is not None:
            raise ConfigError("adascale.total_steps: nothing ends by it with adascale=measure; use max_steps")
    elif (adascale.rule == "gain") != (name == "sgd"):
        fitting = "gain" if name == "sgd" else "sqrt_gain"
        raise ConfigError(
            f"optimizer.name={name}: needs adascale.rule={fitting}, not {adascale.rule}; or {instead}"
        )
    elif config.optimizer.clip_norm is not None:
        raise ConfigError(
            f"optimizer.clip_norm={config.optimizer.clip_norm}: AdaScale would scale clipped steps by the "
            f"gain of gradients that are not; {instead}"
        )
    elif config.schedule.counts != "steps":
        raise ConfigError(
            f"schedule.counts={config.schedule.counts}: AdaScale reads its schedule at the scale-invariant "
            f"steps; choose schedule.counts=steps; or {instead}"
        )
    if count == 1 and launched_ranks() == 1:
        raise ConfigError(
            "adascale.num_gradients_to_accumulate=1: one process needs at least 2 micro-batches per step to "
            "measure the gradient variance"
        )
