"""Plan a sweep: which configurations to compare, and which hyperparameter values to try for each.

* An *arm* is one of the compared configurations.
* A *search* tunes the hyperparameters of one arm. An arm can have several independent searches.
* A *trial* is one training run of a search.
* A *point* contains the hyperparameter values of one trial. The points of a search form a scrambled Sobol
  sequence. If a trial diverges, the search adds a trial at the next point of this sequence.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaecho.config.identity import BUDGETS, differences, digest_form, digest_key, identity, smaller_budgets
from adaecho.errors import FolderError
from adaecho.records.files import read_json, write_json

# Keys that do not influence the points of an arm.
_NOT_CONTENT = ("seed", "device", "precision", "channels_last", "threads")
SEARCH = ("seed", "trials", "repeats", "max_diverged", "prune")  # settings that all searches share
_GROWING = ("trials", "repeats", "max_diverged")


@dataclass(frozen=True)
class Axis:
    """The range in which a search varies one config key.

    Attributes:
        scale: ``linear``, ``log`` (log(x) is uniform) or ``reverse_log`` (log(1 - x) is uniform).
        integer: whether values are rounded to integers.
    """

    key: str
    low: float
    high: float
    scale: str = "linear"
    integer: bool = False

    def value(self, u: float) -> float | int:
        """Return the value at position ``u`` of the range, from 0 (low) to 1 (high)."""
        if self.scale == "log":
            value = self.low * (self.high / self.low) ** u
        elif self.scale == "reverse_log":
            value = 1 - (1 - self.low) * ((1 - self.high) / (1 - self.low)) ** u
        else:
            value = self.low + (self.high - self.low) * u
        value = min(max(value, self.low), self.high)
        return round(value) if self.integer else float(value)

    def position(self, value: float) -> float:
        """Return the position of a value in the range, from 0 (low) to 1 (high)."""
        low, middle, high = self.low, value, self.high
        if self.scale != "linear":
            shift = self.scale == "reverse_log"
            low, middle, high = (math.log(1 - x if shift else x) for x in (low, middle, high))
        return (middle - low) / (high - low)

    def to_dict(self) -> dict[str, Any]:
        """Return the range as a dict, without its key."""
        return {"low": self.low, "high": self.high, "scale": self.scale, "integer": self.integer}


@dataclass(frozen=True)
class Arm:
    """One of the compared configurations, and the ranges in which its hyperparameters are tuned.

    Attributes:
        name: the name of the arm and of its folder in the sweep's folder.
        config: the composed config as plain dicts. Each trial replaces the values of the searched keys.
        axes: the ranges to search; empty if the arm is not tuned.
    """

    name: str
    overrides: tuple[str, ...]
    config: dict[str, Any]
    axes: tuple[Axis, ...] = ()

    def at(self, point: dict[str, Any]) -> dict[str, Any]:
        """Return the config with some values replaced, given as ``{dotted key: value}``."""
        config = self.config
        for key, value in point.items():
            config = with_value(config, key, value)
        return config

    def content(self) -> dict[str, Any]:
        """Return the settings and the ranges that determine which hyperparameter values are tried."""
        kept = {key: value for key, value in identity(self.config).items() if key not in _NOT_CONTENT}
        kept["data"] = {key: value for key, value in kept["data"].items() if key != "path"}
        for axis in self.axes:
            kept = with_value(kept, axis.key, None)
        axes = {digest_key(axis.key): axis.to_dict() for axis in self.axes}
        return {"config": digest_form(kept), "axes": axes}

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that identifies the arm: settings that affect results, budgets and ranges."""
        budgets = {key: self.config.get(key) for key in BUDGETS}
        axes = {axis.key: axis.to_dict() for axis in self.axes}
        return {"config": {**identity(self.config), **budgets}, "axes": axes}


@dataclass(frozen=True)
class TrialId:
    """The identifier of a trial (training run) in a sweep.

    ``str(trial_id)`` is ``<arm>/<repeat>/<index>``, the path of the trial in the sweep's folder.
    """

    arm: str
    repeat: int
    index: int

    def __str__(self) -> str:
        return f"{self.arm}/{self.repeat}/{self.index}"


@dataclass(frozen=True)
class Design:
    """The design of a sweep: its arms (compared configurations) and the settings of their searches.

    Attributes:
        seed: the value of ``search.seed``.
        trials: the number of trials per search, not counting diverged trials.
        repeats: the number of independent searches per arm.
        max_diverged: the maximum number of diverged trials that a search replaces.
        prune: whether to stop a trial that can no longer be the best of its search.
        experiment: the name of the experiment; "" if there is none.
    """

    arms: tuple[Arm, ...]
    seed: int
    trials: int
    repeats: int
    max_diverged: int
    prune: bool = False
    experiment: str = ""
    _cache: dict[tuple[str, int], list[Any]] = field(default_factory=dict, compare=False, repr=False)

    def points(self, arm: Arm, repeat: int, count: int) -> list[list[float | int]]:
        """Return at least the first ``count`` points of a search, each with one value per range."""
        found = self._cache.get((arm.name, repeat), [])
        if len(found) < count and arm.axes:
            seed = stable_hash(self.seed, arm.content(), repeat)
            rows = sobol(seed, len(arm.axes), max(count, self.trials))
            found = [[axis.value(u) for axis, u in zip(arm.axes, row, strict=True)] for row in rows]
            self._cache[arm.name, repeat] = found
        return found

    def point(self, arm: Arm, repeat: int, index: int) -> dict[str, float | int]:
        """Return the hyperparameter values of a trial, as ``{dotted key: value}``."""
        values = self.points(arm, repeat, index + 1)[index] if arm.axes else []
        return {axis.key: value for axis, value in zip(arm.axes, values, strict=True)}

    def trial(self, trial: TrialId) -> tuple[dict[str, Any], list[str]]:
        """Return the config of a trial as plain dicts, and the overrides that produce it."""
        arm = next(arm for arm in self.arms if arm.name == trial.arm)
        point = self.point(arm, trial.repeat, trial.index)
        seed = trial_seed(self.seed, trial.repeat, trial.index)
        values = [f"{key}={value!r}" for key, value in {**point, "seed": seed}.items()]
        return {**arm.at(point), "seed": seed, "restart": False}, [*arm.overrides, *values]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``design.json``, including the points."""

        def record(arm: Arm) -> dict[str, Any]:
            repeats = range(self.repeats if arm.axes else 0)
            points = [self.points(arm, repeat, self.trials) for repeat in repeats]
            return {**arm.to_dict(), "overrides": arm.overrides, "config": arm.config, "points": points}

        search = {name: getattr(self, name) for name in SEARCH}
        arms = {arm.name: record(arm) for arm in self.arms}
        return {"experiment": self.experiment, "search": search, "arms": arms}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Design":
        """Build a design from the content of a ``design.json``."""
        arms: list[Arm] = []
        points: dict[tuple[str, int], list[Any]] = {}
        for name, arm in plain["arms"].items():
            axes = tuple(Axis(key, **axis) for key, axis in arm["axes"].items())
            arms.append(Arm(name, tuple(arm["overrides"]), arm["config"], axes))
            points |= {(name, repeat): rows for repeat, rows in enumerate(arm["points"])}
        return cls(tuple(arms), experiment=plain["experiment"], **plain["search"], _cache=points)

    def differences(self, recorded: "Design") -> list[str]:
        """Return the differences from a recorded design that prevent its sweep from being continued."""
        # More trials, repeats and replacements of diverged trials are allowed.
        lines = smaller_budgets(vars(recorded), vars(self), _GROWING)
        old, new = (
            {
                "search": {"seed": one.seed, "prune": one.prune},
                "arms": sorted(arm.name for arm in one.arms),
                **{arm.name: {**arm.to_dict(), "first point": one.points(arm, 0, 1)[:1]} for arm in one.arms},
            }
            for one in (recorded, self)
        )
        return lines + differences(old, new)


def sobol(seed: int, dimensions: int, count: int) -> list[list[float]]:
    """Return the first points of a scrambled Sobol sequence in [0, 1)^dimensions.

    The number of points is ``count``, rounded up to a power of two. A longer sequence begins with the same
    points.
    """
    from scipy.stats import qmc  # imported here because it is slow, and workers usually do not need it

    # The points are balanced only if their number is a power of two.
    engine = qmc.Sobol(dimensions, scramble=True, rng=seed)
    rows: list[list[float]] = engine.random_base2(max(count - 1, 0).bit_length()).tolist()
    return rows


def trial_seed(search_seed: int, repeat: int, index: int) -> int:
    """Return the seed of a trial, in [0, 2^31). All compared configurations use the same seeds."""
    return stable_hash(search_seed, repeat, index) % 2**31


def stable_hash(*parts: Any) -> int:
    """Return a 64-bit hash of plain values that is the same in every process."""
    digest = hashlib.sha256(json.dumps(_canonical(parts), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _canonical(value: Any) -> Any:
    """Convert whole floats to integers, so that factors 2 and 2.0 have the same hash."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def with_value(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of a config in which the value at a dotted key is replaced."""
    name, _, rest = key.partition(".")
    return {**config, name: with_value(config[name], rest, value) if rest else value}


def read_design(folder: Path) -> Design:
    """Read the design from the folder of a sweep."""
    path = folder / "design.json"
    if not path.exists():
        raise FolderError(
            f"{folder}: not the folder of a sweep (no design.json); pass the folder that -m printed"
        )
    return Design.from_dict(read_json(path))


def record_design(design: Design, folder: Path) -> None:
    """Write ``design.json``, or raise FolderError if the folder contains a different sweep."""
    path = folder / "design.json"
    lines = design.differences(read_design(folder)) if path.exists() else []
    if lines:
        shown = "\n  ".join(lines)
        raise FolderError(
            f"{folder}: contains a different design:\n  {shown}\nRun that design, choose another "
            "hydra.sweep.dir=, or start over with restart=true, which keeps the old folder"
        )
    write_json(path, design.to_dict())
