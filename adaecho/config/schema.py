"""The typed config tree: the schema that ``conf/`` fills and every override is checked against.

Types catch typos and wrong kinds at composition, ``validate`` what a type can't say.
"""

import functools
import inspect
import math
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from adaecho.config import scale
from adaecho.config.bounds import at_least, finite_at_least, one_of, positive, within
from adaecho.config.identity import BUDGETS, run_id
from adaecho.config.launched import launched_ranks
from adaecho.config.optimization import OptimizerConfig, ScheduleConfig, check_optimizer, check_schedule
from adaecho.config.tasks import callback_path, check_options, names_in
from adaecho.echo.variants import ORDERS, PLACES, VARIANTS, check_factor
from adaecho.errors import ConfigError
from adaecho.masking import know, whole

ADASCALE_RULES = ("gain", "sqrt_gain", "measure")
DEVICES = ("auto", "cpu", "cuda")
MAX_THREADS = 1024


@dataclass
class DataConfig:
    """Where training examples come from and how they are split."""

    path: str | None = None  # folder, file, hub id or url; null where the task embeds its data
    # Held out of the training files, by a permutation seeded with split_seed; null where the data has a
    # validation split of its own.
    validation_examples: int | None = None
    split_seed: int = 0  # of that permutation
    order: str = "permutation"  # permutation | shards | stored; what is only iterated has an order of its own
    num_workers: int = 0  # threads that read, decode and augment; 0: in the training thread
    processes: bool = False  # instead of threads: for Python that holds the interpreter's lock
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
    # change how many diverge or miss the target, so an experiment that compares these says needs_every_trial.
    prune: bool = False
    needs_every_trial: bool = False  # refuses prune=true
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


# Keys that there were, which nothing reads any more: those of recorded configs are passed over.
_GONE = {"search": ("allow_changed_code",), "data": ("restore",), "evaluate": ("loss_by_echo_index",)}


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


def from_plain(plain: dict[str, Any], typed: Collection[str] = ()) -> Config:
    """A validated ``Config`` from plain values, e.g. a run folder's ``config.yaml``.

    Args:
        plain: values without interpolations; of urls what records keep is enough where this process has been
            told the rest (see ``masking``).
        typed: tasks and callbacks that the user has named: a module of theirs can be only one of them
            (``find_task``, ``callback_path``).

    Raises:
        ConfigError: a key is unknown, of the wrong type, or its value can't be.
    """
    plain = _resolved(plain)
    others: dict[Any, Any] = {**plain, "task": {"name": "checked below"}}
    for group in (name for name in _GONE if isinstance(others.get(name), dict)):
        others[group] = {key: value for key, value in others[group].items() if key not in _GONE[group]}
    try:
        config = OmegaConf.to_object(OmegaConf.merge(_schema(), others))
    except Exception as error:
        raise ConfigError(f"config: {error}") from error
    assert isinstance(config, Config)
    config.task = check_options(plain.get("task", {}), typed)
    for name in config.callbacks:
        callback_path(name, typed)
    validate(config)
    return config


def from_typed(plain: dict[str, Any]) -> Config:
    """Check what was composed from a command line: task and callbacks may be modules of the user's."""
    return from_plain(plain, names_in(plain))


_NO_URL = re.compile(r"://.*[\s\x00-\x1f]|^[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", re.DOTALL)


def _resolved(value: Any, key: str = "") -> Any:
    """Return plain values with urls in full, whose secrets are known from here on.

    Raises:
        ConfigError: an interpolation, which would put, say, a variable of the environment into a url; or of
            a url only what a record keeps is known.
    """
    if isinstance(value, dict):
        return {name: _resolved(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, key) for item in value]
    if not isinstance(value, str):
        return value
    if "${" in value:
        raise ConfigError(f"{key}: holds an interpolation ({value}), and records hold values alone")
    if _NO_URL.search(value):  # what is no url is not masked, and may hold a secret all the same
        raise ConfigError(
            f"{key}: a url begins with scheme:// and holds no blank: write two slashes, and %20 for a blank"
        )
    know([value])
    try:
        return whole(value)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


@functools.cache  # building the node takes longer than filling it, and a sweep's worker fills one per trial
def _schema() -> DictConfig:
    node: DictConfig = OmegaConf.structured(Config)
    return node


def _resolve_run_id(*, _root_: DictConfig) -> str:
    return run_id(to_plain(_root_))


def register() -> None:
    """Make the schema and the resolvers of ``conf/config.yaml`` known to Hydra."""
    ConfigStore.instance().store(name="schema", node=Config)
    # OmegaConf 2.4 deprecates register_new_resolver for a name that 2.3 has for an older one (no replace=).
    register_resolver: Any = OmegaConf.register_resolver
    if "replace" not in inspect.signature(register_resolver).parameters:
        register_resolver = OmegaConf.register_new_resolver
    register_resolver("adaecho.run_id", _resolve_run_id, replace=True)
    register_resolver("adaecho.name_or", _name_or, replace=True)
    register_resolver("adaecho.scaled", scale.scaled, replace=True)


def _name_or(name: str | None, other: str) -> str:
    return name or other


def value_at(tree: Any, key: str) -> Any:
    """What stands at a dotted key of a config or of plain dicts; None where a dict has no such key.

    Raises:
        ConfigError: the config has no such key. Keys of a search may be out of a record, and by the names of
            attributes any object of the process could be reached, and code run.
    """
    for name in key.split("."):
        if isinstance(tree, dict):
            tree = tree.get(name)
        elif is_dataclass(tree) and name in {field.name for field in fields(tree)}:
            tree = getattr(tree, name)
        else:
            raise ConfigError(f"{key}: there is no such key")
    return tree


_ALLOWED = {
    "echo.variant": tuple(VARIANTS),
    "echo.place": PLACES,
    "data.order": ORDERS,
    "precision": ("auto", "float32", "bfloat16"),
    "device": DEVICES,
    "compile": ("off", "default", "reduce-overhead"),
    "tracking.kind": ("none", "wandb"),
    "tracking.mode": ("offline", "online"),
}
_LEAST = {
    **dict.fromkeys(("batch_size", "threads", "echo.shuffle_buffer", "target.in_a_row"), 1),
    **dict.fromkeys(("evaluate.every_fresh_examples", "evaluate.batch_size", "evaluate.max_examples"), 1),
    **dict.fromkeys(("data.validation_examples", "search.trials", "search.repeats", "search.workers"), 1),
    **dict.fromkeys(("seed", "echo.batch_shuffle_buffer", "data.num_workers", "data.prefetch"), 0),
    **dict.fromkeys(("data.split_seed", "data.max_bad_examples", "search.max_diverged"), 0),
}


def validate(config: Config) -> None:
    """Check what types can't say.

    Raises:
        ConfigError: naming key, value, reason and remedy.
    """
    if config.data.path is not None and not config.data.path.strip():
        raise ConfigError("data.path: is empty; give a path, a hub id or a url, or null for embedded data")
    for key, allowed in _ALLOWED.items():
        one_of(key, value_at(config, key), allowed)
    for key, least in _LEAST.items():
        at_least(key, value_at(config, key), least)
    for key in BUDGETS:
        positive(key, value_at(config, key), "means no limit")
    for key in config.search.axes:
        value_at(config, key)
    if config.threads > MAX_THREADS:
        raise ConfigError(f"threads={config.threads}: more than {MAX_THREADS}, which no processor has")
    if not config.max_loss > 0:
        raise ConfigError(f"max_loss={config.max_loss}: must be positive; beyond it a run counts as diverged")
    finite_at_least("checkpoint_every_s", config.checkpoint_every_s, 0)
    finite_at_least("rank_timeout_s", config.rank_timeout_s, 1)
    within("target.chance_share", config.target.chance_share, "(0, 1]")
    _validate_factor(config.echo)
    check_optimizer(config.optimizer)
    check_schedule(config.schedule)
    _validate_adascale(config)
    _validate_target(config.target, config.max_fresh_examples)


def _validate_target(target: TargetConfig, max_fresh_examples: int | None) -> None:
    if target.value is not None and not math.isfinite(target.value):
        raise ConfigError(f"target.value={target.value}: must be a finite number; null never stops")
    if target.metric == "accuracy" and (target.value or 0.0) > 1:
        raise ConfigError(
            f"target.value={target.value:g}: accuracy is a fraction and can't exceed 1; 97 % is "
            "target.value=0.97"
        )
    if target.chance is not None and max_fresh_examples is None:
        raise ConfigError(
            f"target.chance={target.chance:g}: is judged after a share of max_fresh_examples, which is null; "
            "set it, or drop target.chance"
        )


def _validate_factor(echo: EchoConfig) -> None:
    try:
        check_factor(VARIANTS[echo.variant], echo.factor, echo.max_factor, echo.batch_shuffle_buffer)
    except ValueError as error:
        raise ConfigError(f"echo.{error}") from None
    if echo.split and echo.variant != "example_before_augmentation":
        raise ConfigError(
            f"echo.split=true: echo={echo.variant} augments in one place; choose "
            "echo=example_before_augmentation, or drop echo.split"
        )


def _validate_adascale_rule(config: Config) -> None:
    """The rule against the optimizer, and against what a scaled rate rules out."""
    rule, name = config.adascale.rule, config.optimizer.name
    if rule == "measure":
        if config.adascale.total_steps is not None:
            raise ConfigError(
                f"adascale.total_steps={config.adascale.total_steps}: adascale.rule=measure leaves the "
                "schedule alone, so its scale-invariant steps end nothing; use max_steps"
            )
        return
    if (rule == "gain") != (name == "sgd"):
        remedy = "sqrt_gain" if rule == "gain" else "gain"
        raise ConfigError(
            f"optimizer.name={name}: adascale.rule={rule} is not made for it; choose adascale.rule={remedy}, "
            "adascale=measure to read the gain alone, or adascale=off"
        )
    if config.optimizer.clip_norm is not None:
        raise ConfigError(
            f"optimizer.clip_norm={config.optimizer.clip_norm}: AdaScale's gain is of unclipped gradients, "
            "and would multiply a step that clipping has shortened; choose null, adascale=measure or "
            "adascale=off"
        )
    if config.schedule.counts != "steps":
        raise ConfigError(
            f"schedule.counts={config.schedule.counts}: AdaScale reads its schedule at the scale-invariant "
            "steps; choose schedule.counts=steps, adascale=measure or adascale=off"
        )


def _validate_adascale(config: Config) -> None:
    adascale, count = config.adascale, config.adascale.num_gradients_to_accumulate
    if not adascale.enabled:
        return
    one_of("adascale.rule", adascale.rule, ADASCALE_RULES)
    at_least("adascale.num_gradients_to_accumulate", count, 1)
    _validate_adascale_rule(config)
    if config.batch_size % count:
        raise ConfigError(
            f"batch_size={config.batch_size}: can't be dealt evenly to adascale.num_gradients_to_accumulate="
            f"{count} micro-batches; make it a multiple"
        )
    positive("adascale.total_steps", adascale.total_steps, "never stops")
    shares_examples = config.echo.factor != 1 and (
        VARIANTS[config.echo.variant].repeats != "batches" or config.echo.batch_shuffle_buffer > 0
    )
    if launched_ranks() > 1:  # the gain then comes from the differences between ranks
        return
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
