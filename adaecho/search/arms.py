"""Build the arms of a sweep (the configurations to compare), and parse the ranges in which they are tuned.

Comma-separated values on the command line (``echo.factor=2,4``) or the key ``search.arms`` define the arms.
The range of a tuned config key is written in Hydra's grammar, and tags choose how values are drawn from it::

    tag(log, interval(0.01, 1))              log(x) is uniform
    tag(reverse_log, interval(0.5, 0.98))    log(1 - x) is uniform, for example for momentum
    tag(times_factor, interval(1e4, 1e5))    with echo.factor=2, x is uniform from 2e4 to 2e5
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
# Keys that cannot be searched, because the trials of an arm are comparable only if they share these values.
_NO_AXES = {
    *BUDGETS, "seed", "threads", "restart", "search", "tracking", "target", "evaluate", "data", "echo.factor",
}  # fmt: skip
# Keys that must be equal in all arms of a task, because otherwise the arms would not be comparable.
_OF_ALL_ARMS = (
    "max_fresh_examples", "max_loss", "target.chance_level", "target.chance_share",
    "evaluate.every_fresh_examples", "evaluate.max_examples", "data.validation_examples", "data.split_seed",
)  # fmt: skip


@dataclass(frozen=True)
class SweepOverrides:
    """The command-line overrides of a sweep, sorted by kind.

    Attributes:
        fixed: the overrides with a single value.
        choices: the alternatives in each comma list, for example ``("echo.factor=2", "echo.factor=4")``.
        intervals: the ranges to search, by config key.
    """

    fixed: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]
    intervals: dict[str, IntervalSweep]


def parse_overrides(arguments: Sequence[str], config_loader: ConfigLoader | None = None) -> SweepOverrides:
    """Sort command-line overrides into fixed values, alternatives and ranges."""
    fixed, choices, intervals = [], [], {}
    for override in OverridesParser.create(config_loader).parse_overrides(list(arguments)):
        key = override.get_key_element()
        if override.is_discrete_sweep():
            choices.append(tuple(f"{key}={value}" for value in override.sweep_string_iterator()))
        elif override.is_interval_sweep():
            intervals[key] = override.value()
        else:
            fixed.append(str(override.input_line))
    return SweepOverrides(tuple(fixed), tuple(choices), intervals)  # type: ignore[arg-type]


def composer(config_loader: ConfigLoader, master: DictConfig) -> Compose:
    """Return a function that composes a config from a list of overrides, as plain dicts."""

    def compose(overrides: Sequence[str]) -> dict[str, Any]:
        try:
            return to_plain(config_loader.load_sweep_config(master, list(overrides)))
        except (HydraException, OmegaConfBaseException) as error:
            reason = str(error.__cause__ or error).partition("\nConfig search path")[0].strip()
            raise ConfigError(f"cannot be composed: {reason}") from error

    return compose


def build_arms(
    typed: SweepOverrides, named: dict[str, list[str]], compose: Compose
) -> tuple[list[Arm], list[str]]:
    """Return the configurations (arms) that a sweep compares, and a message for each one that it skips.

    Invalid combinations of values are skipped, such as ``echo=none`` with ``echo.factor=2``.

    Raises:
        ConfigError: a value has no valid combination, or arms differ in a key that all arms must share.
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
            arms.setdefault(stable_hash(arm.to_dict(), arm.config["callbacks"]), arm)
    # A value that has no valid combination is probably a mistake.
    for parts, reason in impossible.items():
        if not possible.issuperset(parts):
            raise reason
    _check_comparable(list(arms.values()))
    left_out = [f"left out: {' '.join(parts).strip()} ({reason})" for parts, reason in impossible.items()]
    return list(arms.values()), left_out


def _build_arm(
    name: str, typed: SweepOverrides, combination: Sequence[str], extra: Sequence[str], compose: Compose
) -> Arm:
    overrides = [*typed.fixed, *combination, *extra]
    of_arm = {key for override in (*combination, *extra) for key in _keys_set(override)}
    chosen = of_arm | {key for override in typed.fixed for key in _keys_set(override)}
    both = {*map(_key, typed.fixed), *map(_key, combination), *typed.intervals} & {*map(_key, extra)}
    if both:
        raise ConfigError(f"{min(both)}: set on the command line and by the arm; keep only one")
    if "seed" in chosen or any(key.startswith("search.") for key in of_arm):
        raise ConfigError(
            "seed: a sweep derives the seeds from search.seed; set search.* once for all arms, or use "
            "hydra/sweeper=basic for plain runs over seeds"
        )
    config = compose(overrides)
    variant, factor = config["echo"]["variant"], config["echo"]["factor"]
    if config["max_steps"] is not None and "max_steps" not in of_arm and factor != "auto":
        # With echoing factor e, an arm takes e times as many steps for the same number of fresh examples, so
        # its limit is e times as large (paper, section 4).
        config = {**config, "max_steps": round(config["max_steps"] * factor)}
    # With one trial per search, there is nothing to choose from, so each arm uses the values of its task
    # instead of a random point.
    of_task = config["search"]["axes"] if config["search"]["trials"] > 1 else {}
    texts = {key: text for key, text in of_task.items() if key not in chosen} | typed.intervals
    options = options_class(config["task"]["name"])
    axes = tuple(parse_axis(key, text, factor, options) for key, text in sorted(texts.items()))
    parts = [f"{_key(one).rpartition('.')[2]}-{one.partition('=')[2]}" for one in combination]
    parts = [name, *parts] if name else parts or [variant if variant == "none" else f"{variant}_e{factor}"]
    folder = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(parts)).strip("-.")
    arm = Arm(folder, tuple(overrides), config, axes)
    for u in (0.0, 1.0) if axes else (0.0,):  # so that invalid values are found before any trial runs
        from_plain(arm.at({axis.key: axis.value(u) for axis in axes}))
    return arm


def _check_comparable(arms: Sequence[Arm]) -> None:
    name, number = Counter(arm.name for arm in arms).most_common(1)[0]
    if number > 1:
        raise ConfigError(f"{name}: {number} arms have this name; name them in search.arms")
    first: dict[tuple[str, str], Arm] = {}
    for arm, key in itertools.product(arms, _OF_ALL_ARMS):
        reference = first.setdefault((arm.config["task"]["name"], key), arm)
        mine, theirs = value_at(arm.config, key), value_at(reference.config, key)
        if mine != theirs:
            raise ConfigError(
                f"{key}: {mine} in arm {arm.name}, {theirs} in arm {reference.name}; all arms need the "
                "same value; set it once for all"
            )


def parse_axis(
    key: str, text: str | IntervalSweep, factor: Any = 1, options: type[TaskConfig] = TaskConfig
) -> Axis:
    """Parse the range in which a config key is tuned, for example ``tag(log, interval(0.01, 1))``."""
    # factor is echo.factor, and options is the class of the options task.*, which determines their types.
    where = f"search.axes: {key}: {text}"
    sweep: Any = text
    try:
        if isinstance(text, str):
            sweep = OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException as error:
        raise ConfigError(f"{where}: invalid: {error}") from error
    if not isinstance(sweep, IntervalSweep):
        raise ConfigError(f"{where}: expected an interval, for example tag(log, interval(0.01, 1))")
    scales = sweep.tags - {"times_factor"}
    if not scales < {"log", "reverse_log"}:
        raise ConfigError(f"{where}: unknown tag; use times_factor, and log or reverse_log")
    low, high, scale = float(sweep.start or 0), float(sweep.end or 0), next(iter(scales), "linear")
    if "times_factor" in sweep.tags:
        if not isinstance(factor, int | float):
            raise ConfigError(f"{where}: times_factor needs a number as echo.factor")
        low, high = low * factor, high * factor
    integer = _type_of(key, options) in (int, int | None)
    if integer and high - low < math.inf:
        low, high = math.ceil(low), math.floor(high)
    fits = {"linear": True, "log": low > 0, "reverse_log": high < 1}[scale]
    if not (fits and -math.inf < low < high < math.inf):
        raise ConfigError(
            f"{where}: expected finite bounds low < high, with low > 0 for log and high < 1 for reverse_log"
        )
    return Axis(key, low, high, scale, integer)


def _type_of(key: str, options: type[TaskConfig]) -> Any:
    if {key, key.partition(".")[0]} & _NO_AXES:
        raise ConfigError(
            f"search.axes: {key}: cannot be searched, since the trials of an arm must share it; compare "
            "its values as arms (search.arms or a comma list)"
        )
    kind: Any = Config
    for name in key.split("."):
        fields = get_type_hints(kind) if is_dataclass(kind) else {}
        kind = options if kind is Config and name == "task" else fields.get(name)
    if kind not in (int, int | None, float, float | None, Any):
        raise ConfigError(f"search.axes: {key}: expected a key with a number")
    return kind


def _keys_set(override: str) -> list[str]:
    """Return all config keys that an override sets, even nested ones as in ``schedule={decay_steps: 9}``."""
    if override.startswith("~"):
        return [_key(override)]
    value = OverridesParser.create().parse_override(override).value()
    return [key for key, _ in flat({_key(override): value})]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")
