"""From what was typed to arms: comma lists and ``search.arms`` composed through Hydra, each with its axes.

An axis is a range of one config key in Hydra's sweep grammar::

    optimizer.learning_rate: tag(log, interval(0.01, 1))         log-uniform
    optimizer.momentum:      tag(reverse_log, interval(0.5, 0.98))   1 - m is log-uniform
    schedule.decay_steps:    tag(times_factor, interval(1e4, 1.5e5))  both bounds times echo.factor
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from adaecho.config.identity import BUDGETS, flat
from adaecho.config.schema import Config, from_plain, to_plain, value_at
from adaecho.config.tasks import TaskConfig, options_class
from adaecho.errors import ConfigError
from adaecho.search.design import Arm, Axis, stable_hash

Compose = Callable[[Sequence[str]], dict[str, Any]]
_LONGEST_NAME = 200
# What all trials of an arm share, so that they can be compared: how long, on what, measured how.
_NO_AXES = {
    *BUDGETS, "seed", "threads", "fresh", "search", "tracking", "target", "evaluate", "data", "echo.factor",
}  # fmt: skip
# What the arms of a task share, or their costs and how many diverged could not be compared.
_OF_ALL_ARMS = (
    "max_fresh_examples", "max_loss", "target.chance", "target.chance_share", "evaluate.every_fresh_examples",
    "evaluate.max_examples", "data.validation_examples", "data.split_seed",
)  # fmt: skip


@dataclass(frozen=True)
class Typed:
    """The task overrides of a sweep, sorted by what they are.

    Attributes:
        fixed: the same for all arms.
        choices: one list of alternatives per comma list; arms are all combinations.
        intervals: axes that were typed, by key.
    """

    fixed: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]
    intervals: dict[str, IntervalSweep]


def parse_typed(arguments: Sequence[str], config_loader: ConfigLoader | None = None) -> Typed:
    """Sort overrides into fixed ones, comma lists (also ``choice``, ``range``, ``glob``) and intervals."""
    fixed, choices, intervals = [], [], {}
    for override in OverridesParser.create(config_loader).parse_overrides(list(arguments)):
        key = override.get_key_element()
        if override.is_discrete_sweep():
            choices.append(tuple(f"{key}={value}" for value in override.sweep_string_iterator()))
        elif override.is_interval_sweep():
            intervals[key] = override.value()
        else:
            fixed.append(str(override.input_line))
    return Typed(tuple(fixed), tuple(choices), intervals)  # type: ignore[arg-type]


def composer(config_loader: ConfigLoader, master: DictConfig) -> Compose:
    """A function from task overrides to the plain config that Hydra composes of them."""

    def compose(overrides: Sequence[str]) -> dict[str, Any]:
        try:
            return to_plain(config_loader.load_sweep_config(master, list(overrides)))
        except (HydraException, OmegaConfBaseException) as error:
            reason = str(error.__cause__ or error).partition("\nConfig search path")[0].strip()
            raise ConfigError(f"doesn't compose: {reason}") from error

    return compose


def build_arms(typed: Typed, named: dict[str, list[str]], compose: Compose) -> tuple[list[Arm], list[str]]:
    """Every arm of the sweep, each once; and what was left out, with the reason.

    A combination of comma lists that can't be, e.g. ``echo=none echo.factor=2``, is left out where each of
    its values is part of another one that can.

    Args:
        typed: what was typed.
        named: ``search.arms``: the overrides of each.
        compose: see ``composer``.

    Raises:
        ConfigError: an arm doesn't compose or isn't valid, or arms can't be compared; names them.
    """
    arms: dict[int, Arm] = {}
    possible: set[str] = set()
    impossible: dict[tuple[str, ...], ConfigError] = {}
    for combination, (name, extra) in itertools.product(
        itertools.product(*typed.choices), (named or {"": []}).items()
    ):
        try:
            arm = _build_arm(name, typed, combination, extra, compose)
        except ConfigError as error:
            impossible[name, *combination] = ConfigError(f"arm {name}: {error}") if name else error
        else:
            possible.update((name, *combination))
            arms.setdefault(stable_hash(arm.to_dict()), arm)
    for parts, reason in impossible.items():
        if not possible.issuperset(parts):
            raise reason
    _check_comparable(list(arms.values()))
    left_out = [f"left out: {' '.join(parts).strip()} ({reason})" for parts, reason in impossible.items()]
    return list(arms.values()), left_out


def _build_arm(
    name: str, typed: Typed, combination: Sequence[str], extra: Sequence[str], compose: Compose
) -> Arm:
    overrides = [*typed.fixed, *combination, *extra]
    of_arm = {key for override in (*combination, *extra) for key in _keys_set(override)}
    chosen = of_arm | {key for override in typed.fixed for key in _keys_set(override)}
    both = {*map(_key, typed.fixed), *map(_key, combination), *typed.intervals} & {*map(_key, extra)}
    if both:
        raise ConfigError(f"{min(both)}: set on the command line and by the arm; keep one of the two")
    if "seed" in chosen or any(key.startswith("search.") for key in of_arm):
        raise ConfigError(
            "a sweep has one search, and seeds follow from search.seed, repeat and index: set search.* once "
            "for all arms, and no seed; hydra/sweeper=basic runs plain configs over seeds"
        )
    config = compose(overrides)
    variant, factor = config["echo"]["variant"], config["echo"]["factor"]
    if config["max_steps"] is not None and "max_steps" not in of_arm and factor != "auto":
        # An echoed arm may take e times the steps for the same fresh examples (paper, section 4).
        config = {**config, "max_steps": round(config["max_steps"] * factor)}
    # Of one trial each arm runs at its task's own values: a single random point says nothing about an arm.
    of_task = config["search"]["axes"] if config["search"]["trials"] > 1 else {}
    texts = {key: text for key, text in of_task.items() if key not in chosen} | typed.intervals
    options = options_class(config["task"]["name"])
    axes = tuple(parse_axis(key, text, factor, options) for key, text in sorted(texts.items()))
    parts = [f"{_key(one).rpartition('.')[2]}-{one.partition('=')[2]}" for one in combination]
    parts = [name, *parts] if name else parts or [variant if variant == "none" else f"{variant}_e{factor}"]
    folder = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(parts)).strip("-.")
    if not 0 < len(folder) <= _LONGEST_NAME:
        raise ConfigError(f"{folder or name!r}: no name for a folder; name the arms in search.arms")
    arm = Arm(folder, tuple(overrides), config, axes)
    for u in (0.0, 1.0) if axes else (0.0,):  # a valid config at both ends, before anything runs
        from_plain(arm.at({axis.key: axis.value(u) for axis in axes}))
    return arm


def _check_comparable(arms: Sequence[Arm]) -> None:
    name, number = Counter(arm.name for arm in arms).most_common(1)[0]
    if number > 1:
        raise ConfigError(f"{name}: {number} arms would have this name; name them in search.arms")
    first: dict[tuple[str, str], Arm] = {}
    for arm, key in itertools.product(arms, _OF_ALL_ARMS):
        reference = first.setdefault((arm.config["task"]["name"], key), arm)
        mine, theirs = value_at(arm.config, key), value_at(reference.config, key)
        if mine != theirs:
            raise ConfigError(
                f"{key}: {mine} in arm {arm.name}, {theirs} in arm {reference.name}; arms are compared at "
                "equal budgets and measured alike: set it once, for all"
            )


def parse_axis(
    key: str, text: str | IntervalSweep, factor: Any = 1, options: type[TaskConfig] = TaskConfig
) -> Axis:
    """The axis that an interval describes, for an arm with this echoing factor.

    Args:
        key: dotted config key that the axis varies.
        text: Hydra's ``interval(low, high)`` with the tags log, reverse_log, times_factor; or it parsed.
        factor: ``echo.factor`` of the arm; multiplies the bounds of a times_factor axis.
        options: of the arm's task, whose fields are the keys ``task.*``.

    Raises:
        ConfigError: the key can't be searched, or the interval can't be; names both.
    """
    where = f"search.axes: {key}: {text}"
    sweep: Any = text
    try:
        if isinstance(text, str):
            sweep = OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException as error:
        raise ConfigError(f"{where} can't be read: {error}") from error
    if not isinstance(sweep, IntervalSweep):
        raise ConfigError(f"{where} is not an interval; write e.g. tag(log, interval(0.01, 1))")
    scales = sweep.tags - {"times_factor"}
    if not scales < {"log", "reverse_log"}:
        raise ConfigError(f"{where}: the tags are times_factor, and one of log and reverse_log")
    low, high, scale = float(sweep.start or 0), float(sweep.end or 0), next(iter(scales), "linear")
    if "times_factor" in sweep.tags:
        if not isinstance(factor, int | float):
            raise ConfigError(f"{where}: its bounds scale with echo.factor, which must be a number")
        low, high = low * factor, high * factor
    integer = _type_of(key, options) in (int, int | None)
    if integer and high - low < math.inf:
        low, high = math.ceil(low), math.floor(high)
    fits = {"linear": True, "log": low > 0, "reverse_log": high < 1}[scale]
    if not (fits and -math.inf < low < high < math.inf):
        raise ConfigError(
            f"{where}: needs finite bounds, the lower one first; above 0 for log, below 1 for reverse_log"
        )
    return Axis(key, low, high, scale, integer)


def _type_of(key: str, options: type[TaskConfig]) -> Any:
    if {key, key.partition(".")[0]} & _NO_AXES:
        raise ConfigError(
            f"search.axes: {key}: is the same for all trials of an arm, or they could not be compared; make "
            "arms of it (search.arms, or a comma list)"
        )
    kind: Any = Config
    for name in key.split("."):
        fields = get_type_hints(kind) if is_dataclass(kind) else {}
        kind = options if kind is Config and name == "task" else fields.get(name)
    if kind not in (int, int | None, float, float | None, Any):
        raise ConfigError(f"search.axes: {key}: is no number of the config, so it can't be searched")
    return kind


def _keys_set(override: str) -> list[str]:
    """The keys that an override gives a value, within ``schedule={decay_steps: 9}`` too."""
    if override.startswith("~"):
        return [_key(override)]
    value = OverridesParser.create().parse_override(override).value()
    return [key for key, _ in flat({_key(override): value})]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")
