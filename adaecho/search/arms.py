"""From what was typed to arms: comma lists and ``search.arms`` composed through Hydra, each with its axes."""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from adaecho.config.identity import flat
from adaecho.config.schema import SearchConfig, from_typed, to_plain, value_at
from adaecho.config.tasks import options_class
from adaecho.errors import ConfigError
from adaecho.masking import masked, secret_urls
from adaecho.search import axes
from adaecho.search.axes import Axis
from adaecho.search.design import Arm, stable_hash, with_value

Compose = Callable[[Sequence[str]], dict[str, Any]]
_MAX_NAME = 80
_TAKEN = {
    *("lock", "workers", "slurm", "wandb", "design.json", "data.json"),
    *("trials.json", "outcome.json", "optuna.journal"),
}
_MEASURED_BY = (
    *("evaluate.every_fresh_examples", "evaluate.max_examples"),
    *("data.validation_examples", "data.split_seed"),
)
_DIVERGENCE = ("max_loss", "target.chance", "target.chance_share")


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


def composer(
    config_loader: ConfigLoader, master: DictConfig, plain: dict[str, Any], fixed: Sequence[str]
) -> Compose:
    """A function from task overrides to the plain config that Hydra composes of them, each only once.

    Args:
        config_loader: Hydra's.
        master: the sweep's config; Hydra has composed it of the ``fixed`` overrides.
        plain: its values.
    """
    known = {tuple(fixed): plain}

    def compose(overrides: Sequence[str]) -> dict[str, Any]:
        key = tuple(overrides)
        if key not in known:
            known[key] = to_plain(config_loader.load_sweep_config(master, list(key)))
        return known[key]

    return compose


def parse_typed(arguments: Sequence[str], config_loader: ConfigLoader | None = None) -> Typed:
    """Sort overrides into fixed ones, comma lists (also ``choice``, ``range``, ``glob``) and intervals."""
    fixed, choices, intervals = [], [], {}
    for override in OverridesParser.create(config_loader).parse_overrides(list(arguments)):
        key = override.get_key_element()
        if override.is_discrete_sweep():
            if key.startswith("search."):
                raise ConfigError(f"{key}: a sweep has one search; run one command per value instead")
            choices.append(tuple(f"{key}={value}" for value in override.sweep_string_iterator()))
        elif override.is_interval_sweep():
            interval = override.value()
            assert isinstance(interval, IntervalSweep)
            intervals[key] = interval
        else:
            assert override.input_line is not None
            fixed.append(override.input_line)
    return Typed(tuple(fixed), tuple(choices), intervals)


def build_arms(typed: Typed, compose: Compose) -> tuple[tuple[Arm, ...], SearchConfig, list[str]]:
    """Every arm of the sweep, each once, the search settings they share, and what was left out and why.

    A combination that can't be, e.g. ``echo=none echo.factor=2``, is left out if each of its values is part
    of another that can, or would be without what else was typed of its group (here ``echo.factor=2``).

    Raises:
        ConfigError: an arm doesn't compose or isn't valid (names it), an axis can't be, two arms would read
            different fresh budgets or be searched differently, or an arm sets what the command line sets.
    """
    arms: dict[int, Arm] = {}
    possible: set[str] = set()
    impossible: dict[tuple[str, ...], ConfigError] = {}
    shared = _composed("", typed, compose, ())["search"]
    for combination in itertools.product(*typed.choices):
        for name, extra in (shared["arms"] or {"": []}).items():
            parts = (name, *combination)
            try:
                arm = _build_arm(name, typed, combination, extra, compose)
                _check_corners(arm)
                _check_derived(arm, compose)
            except ConfigError as error:
                impossible[parts] = error
                continue
            possible.update(parts)
            same = arms.setdefault(stable_hash(arm.to_dict()), arm)
            _check_urls(same, arm)
    for parts, reason in impossible.items():
        if not all(part in possible or _can_be(part, typed, compose) for part in parts) or not arms:
            raise reason
    search = SearchConfig(**shared)
    _check_names(shared["arms"] or {}, shared["baselines"])
    _check_search(list(arms.values()), search)
    _check_budgets(list(arms.values()))
    left_out = [
        f"left out: {' '.join(masked(list(parts))).strip()} ({_without_arm(reason)})"
        for parts, reason in impossible.items()
    ]
    named = _unique_names(list(arms.values()))
    names = {arm.name for arm in named}
    left_out += [
        f"search.baselines.{name}: no ratio to {baseline}, as there are no two arms of these names"
        for name, baseline in shared["baselines"].items()
        if name in {*names, *shared["arms"]} and not {name, baseline} <= names
    ]
    return tuple(named), search, left_out + _measured_otherwise(named)


def _measured_otherwise(arms: Sequence[Arm]) -> list[str]:
    """One line for each key by which arms' metrics, and so their costs to a target, are of other examples."""
    lines = []
    for key in _MEASURED_BY:
        (first, expected), *rest = ((arm.name, value_at(arm.config, key)) for arm in arms)
        other, value = next((one for one in rest if one[1] != expected), (first, expected))
        if other != first:
            lines.append(
                f"{key}: {value} in arm {other}, {expected} in arm {first}: measured otherwise, their costs "
                "can't be compared, and a ratio of them says little"
            )
    return lines


def _check_names(arms: Iterable[str], baselines: Mapping[str, str]) -> None:
    """Raises ConfigError where an arm has a name that its folder, by which rows are told, can't have."""
    for name in arms:
        folder = _folder_name(name)
        as_it_is = folder == name and len(name) <= _MAX_NAME and name not in _TAKEN
        if not folder or (not as_it_is and name in {*baselines, *baselines.values()}):
            raise ConfigError(
                f"search.arms.{name}: arms are folders, and this is no name of one: at most {_MAX_NAME} "
                f"letters (A to Z, a to z), digits, '.', '_' and '-', and none of {', '.join(sorted(_TAKEN))}"
            )


def _check_urls(one: Arm, other: Arm) -> None:
    """Raises ConfigError where two arms differ in secrets of urls alone, by which nothing is told apart."""
    urls, others = secret_urls([one.config]), secret_urls([other.config])
    if urls != others:
        raise ConfigError(
            f"{masked((others or urls)[0])}: two urls that differ in user, password or query alone are one "
            "to records, which keep none of these; give each a sweep with a hydra.sweep.dir= of its own"
        )


def _can_be(value: str, typed: Typed, compose: Compose) -> bool:
    """Whether a value of a comma list is valid beside what was typed of other groups than its own."""
    if "=" not in value:  # the name of an arm
        return False
    group = _key(value).partition(".")[0]
    others = [one for one in typed.fixed if _key(one).partition(".")[0] != group]
    try:
        from_typed(compose([*others, value]))
    except (ConfigError, HydraException, OmegaConfBaseException):
        return False
    return True


def _without_arm(reason: ConfigError) -> str:
    return re.sub(r"^arm \S+: ", "", str(reason))


def _build_arm(
    name: str, typed: Typed, combination: Sequence[str], extra: Sequence[str], compose: Compose
) -> Arm:
    _check_conflict(name, [*typed.fixed, *combination, *typed.intervals], extra)
    overrides = [*typed.fixed, *combination, *extra]
    config = _composed(name, typed, compose, [*combination, *extra])
    chosen = {key for override in overrides for key in _keys_set(override)}
    if "seed" in chosen:
        raise ConfigError(
            "seed: the seeds of a search follow from search.seed, repeat and index; set search.seed or "
            "search.repeats, or use hydra/sweeper=basic for plain runs over seeds"
        )
    return Arm(
        name=_arm_name(name, combination, config),
        overrides=tuple(overrides),
        config=_scale_step_cap(
            config, fixed_by_arm="max_steps" in {_key(each) for each in (*combination, *extra)}
        ),
        axes=_axes_of(config, chosen, typed.intervals),
    )


def _composed(name: str, typed: Typed, compose: Compose, varied: Sequence[str]) -> dict[str, Any]:
    try:
        return compose([*typed.fixed, *varied])
    except (HydraException, OmegaConfBaseException) as error:
        reason, _, _ = str(error.__cause__ or error).partition("\nConfig search path")
        arm = f"arm {name}: " if name else ""
        raise ConfigError(f"{arm}{' '.join(varied)} doesn't compose: {reason.strip()}") from error


def _axes_of(config: dict[str, Any], chosen: set[str], typed: dict[str, IntervalSweep]) -> tuple[Axis, ...]:
    """The typed axes and, of a search of several trials, the task's; a key set by hand is not searched.

    Of one trial each arm runs at its task's own values: a single random point says nothing about an arm.
    """
    task, search = config["task"]["name"], config["search"]
    factor, options = config["echo"]["factor"], options_class(task, typed=[task])
    found = {
        key: axes.parse(key, text, factor, options)
        for key, text in (search["axes"].items() if search["trials"] > 1 else ())
        if key not in chosen and key not in typed
    }
    found |= {key: axes.from_interval(key, interval, factor, options) for key, interval in typed.items()}
    return tuple(found[key] for key in sorted(found))


def _check_search(arms: list[Arm], shared: SearchConfig) -> None:
    """One search for all: no arm has trials, seeds or a way of stopping of its own."""
    for arm in arms:
        own = SearchConfig(**arm.config["search"])
        for name in ("seed", "trials", "repeats", "max_diverged", "prune"):
            if getattr(own, name) != getattr(shared, name):
                raise ConfigError(
                    f"search.{name}: {getattr(own, name)} in arm {arm.name}, {getattr(shared, name)} in the "
                    "sweep; a sweep has one search: set it once, or run one command per value"
                )
        for key in _DIVERGENCE:
            mine, first = (value_at(one.config, key) for one in (arm, arms[0]))
            if mine != first:
                raise ConfigError(
                    f"{key}: {mine} in arm {arm.name}, {first} in arm {arms[0].name}; what counts as "
                    "diverged is the same for all arms: set it once"
                )
        if own.prune and own.needs_every_trial:
            raise ConfigError(
                f"search.prune=true: arm {arm.name} is of an experiment that compares how many "
                "trials diverge or miss the target, and stopping trials early would change that; drop it"
            )


def _check_corners(arm: Arm) -> None:
    """An arm must be a valid config before anything runs: at both ends of its axes, and between.

    Of whole numbers some within may be none: a batch that can't be dealt evenly.
    """
    whole = any(isinstance(axis.value(0.5), int) for axis in arm.axes)
    for u in [one / 16 for one in range(17)] if whole else (0.0, 1.0) if arm.axes else (0.0,):
        config = arm.config
        for axis in arm.axes:
            config = with_value(config, axis.key, axis.value(u))
        try:
            from_typed(config)
        except ConfigError as error:
            raise ConfigError(f"arm {arm.name}: {error}") from error


def _check_derived(arm: Arm, compose: Compose) -> None:
    """Nothing else may be computed of what is searched: a trial is the arm's config with its point put in.

    Raises:
        ConfigError: an interpolation or resolver reads a searched key.
    """
    before = dict(flat(compose(arm.overrides))) if arm.axes else {}
    kept = sorted(before.keys() - {axis.key for axis in arm.axes})
    for axis in arm.axes:
        was = before[axis.key]
        value = next((x for x in map(axis.value, (0.25, 0.75, 0.0, 1.0)) if x != was), was)
        after = dict(flat(compose([*arm.overrides, f"{axis.key}={value!r}"])))
        derived = [key for key in kept if before[key] != after.get(key) and not key.startswith("search.")]
        if derived:
            raise ConfigError(
                f"arm {arm.name}: {axis.key} is searched, and of it is computed {' and '.join(derived)}: "
                f"trials would keep what is right for {axis.key}={was}. Give {axis.key} as a comma list, "
                f"whose values are arms of their own, or set {'= and '.join(derived)}="
            )


def _scale_step_cap(config: dict[str, Any], fixed_by_arm: bool) -> dict[str, Any]:
    """An echoed arm may take e times the steps for the same fresh examples (paper, section 4)."""
    steps, factor = config["max_steps"], config["echo"]["factor"]
    if steps is None or fixed_by_arm or not isinstance(factor, int | float):
        return config
    return {**config, "max_steps": round(steps * factor)}


def _check_budgets(arms: list[Arm]) -> None:
    first: dict[str, Arm] = {}
    for arm in arms:
        reference = first.setdefault(arm.config["task"]["name"], arm)
        mine, theirs = (one.config["max_fresh_examples"] for one in (arm, reference))
        if mine != theirs:
            raise ConfigError(
                f"max_fresh_examples: {mine} in arm {arm.name}, {theirs} in arm {reference.name}; arms are "
                "compared at equal budgets of fresh examples: set it once, for the task"
            )


def _check_conflict(name: str, typed: Sequence[str], extra: Sequence[str]) -> None:
    both = {_key(override) for override in typed} & {_key(override) for override in extra}
    if both:
        key = sorted(both)[0]
        raise ConfigError(
            f"{key}: set on the command line and by arm {name} of the experiment; keep one of the two"
        )


def _arm_name(name: str, combination: Sequence[str], config: dict[str, Any]) -> str:
    """The experiment's name and what the comma lists chose; without either, what is echoed."""
    parts = [name] if name else []
    parts += [f"{_key(override).rpartition('.')[2]}-{masked(_value(override))}" for override in combination]
    if not parts:
        variant, factor = config["echo"]["variant"], config["echo"]["factor"]
        parts = [variant if variant == "none" else f"{variant}_e{factor}"]
    return _folder_name("_".join(parts))


def _folder_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")


def _unique_names(arms: list[Arm]) -> list[Arm]:
    """Names that are folders: not too long, no two alike, and none of what a sweep writes itself."""
    names = [arm.name for arm in arms]
    return [
        replace(arm, name=f"{arm.name[:_MAX_NAME]}-{_digest(arm)}")
        if len(arm.name) > _MAX_NAME or names.count(arm.name) > 1 or arm.name in _TAKEN
        else arm
        for arm in arms
    ]


def _digest(arm: Arm) -> str:
    return hashlib.sha256(repr(arm.overrides).encode()).hexdigest()[:8]


def _keys_set(override: str) -> list[str]:
    """The keys that an override gives a value, within ``schedule={decay_steps: 9}`` too."""
    if override.startswith("~"):
        return [_key(override)]
    value = OverridesParser.create().parse_override(override).value()
    return [key for key, _ in flat({_key(override): value})]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _value(override: str) -> str:
    return override.partition("=")[2]
