"""The design of a sweep: its arms, and the points of each, before any trial runs.

A point is a function of (search seed, content of the arm, repeat, index). It is a scrambled Sobol point of
scipy, and the seed of the sequence is a hash of the first three. So workers need no coordination, and a
search that has a diverged trial can take one more point.
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

# Keys that do not change the points of an arm.
_NOT_CONTENT = ("seed", "device", "precision", "channels_last", "threads")
SEARCH = ("seed", "trials", "repeats", "max_diverged", "prune")  # shared by all searches of a sweep
_GROWING = ("trials", "repeats", "max_diverged")


@dataclass(frozen=True)
class Axis:
    """One range of a search: ``value(u)`` maps u in [0, 1) to [low, high].

    Attributes:
        key: dotted config key.
        low, high: bounds.
        scale: linear, log (log x is uniform), or reverse_log (log(1 - x) is uniform, for momentum).
        integer: values are rounded, because the type of the key is int.
    """

    key: str
    low: float
    high: float
    scale: str = "linear"
    integer: bool = False

    def value(self, u: float) -> float | int:
        """Return the value at position ``u`` of the axis."""
        if self.scale == "log":
            value = self.low * (self.high / self.low) ** u
        elif self.scale == "reverse_log":
            value = 1 - (1 - self.low) * ((1 - self.high) / (1 - self.low)) ** u
        else:
            value = self.low + (self.high - self.low) * u
        value = min(max(value, self.low), self.high)
        return round(value) if self.integer else float(value)

    def position(self, value: float) -> float:
        """Return the position of a value on the axis, 0 at low and 1 at high: the inverse of ``value``."""
        low, middle, high = self.low, value, self.high
        if self.scale != "linear":
            shift = self.scale == "reverse_log"
            low, middle, high = (math.log(1 - x if shift else x) for x in (low, middle, high))
        return (middle - low) / (high - low)

    def to_dict(self) -> dict[str, Any]:
        """Return the axis as in ``design.json``."""
        return {"low": self.low, "high": self.high, "scale": self.scale, "integer": self.integer}


@dataclass(frozen=True)
class Arm:
    """One configuration under comparison, and the axes along which it is tuned.

    Attributes:
        name: its folder in the folder of the sweep.
        overrides: the overrides that it was composed of.
        config: plain resolved config. Each trial replaces the values at the keys of the axes.
    """

    name: str
    overrides: tuple[str, ...]
    config: dict[str, Any]
    axes: tuple[Axis, ...] = ()

    def at(self, point: dict[str, Any]) -> dict[str, Any]:
        """Return the config with these values at dotted keys."""
        config = self.config
        for key, value in point.items():
            config = with_value(config, key, value)
        return config

    def content(self) -> dict[str, Any]:
        """Return what decides the points: the identity without seed, device and searched values."""
        kept = {key: value for key, value in identity(self.config).items() if key not in _NOT_CONTENT}
        kept["data"] = {key: value for key, value in kept["data"].items() if key != "path"}
        for axis in self.axes:
            kept = with_value(kept, axis.key, None)
        axes = {digest_key(axis.key): axis.to_dict() for axis in self.axes}
        return {"config": digest_form(kept), "axes": axes}

    def to_dict(self) -> dict[str, Any]:
        """Return what the arm computes. Arms with equal dicts are the same arm."""
        budgets = {key: self.config.get(key) for key in BUDGETS}
        axes = {axis.key: axis.to_dict() for axis in self.axes}
        return {"config": {**identity(self.config), **budgets}, "axes": axes}


@dataclass(frozen=True)
class TrialId:
    """Name of a trial and its folder, ``<arm>/<repeat>/<index>``."""

    arm: str
    repeat: int
    index: int

    def __str__(self) -> str:
        return f"{self.arm}/{self.repeat}/{self.index}"


@dataclass(frozen=True)
class Design:
    """All searches of a sweep: ``repeats`` per arm, with ``trials`` non-divergent trials each.

    Attributes:
        seed: ``search.seed``.
        trials: non-divergent trials per search.
        repeats: independent searches per arm.
        max_diverged: diverged trials per search that are replaced by further points.
        prune: whether to stop trials that cannot become the best of their search.
        experiment: name of the experiment, or "".
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
        """Return at least ``count`` points of a search, each with one value per axis."""
        found = self._cache.get((arm.name, repeat), [])
        if len(found) < count and arm.axes:
            seed = stable_hash(self.seed, arm.content(), repeat)
            rows = sobol(seed, len(arm.axes), max(count, self.trials))
            found = [[axis.value(u) for axis, u in zip(arm.axes, row, strict=True)] for row in rows]
            self._cache[arm.name, repeat] = found
        return found

    def point(self, arm: Arm, repeat: int, index: int) -> dict[str, float | int]:
        """Return the hyper-parameters of a trial by config key."""
        values = self.points(arm, repeat, index + 1)[index] if arm.axes else []
        return {axis.key: value for axis, value in zip(arm.axes, values, strict=True)}

    def trial(self, trial: TrialId) -> tuple[dict[str, Any], list[str]]:
        """Return the plain config of a trial, and the overrides that compose it: arm, point and seed."""
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
        """Return the design in a ``design.json``."""
        arms: list[Arm] = []
        points: dict[tuple[str, int], list[Any]] = {}
        for name, arm in plain["arms"].items():
            axes = tuple(Axis(key, **axis) for key, axis in arm["axes"].items())
            arms.append(Arm(name, tuple(arm["overrides"]), arm["config"], axes))
            points |= {(name, repeat): rows for repeat, rows in enumerate(arm["points"])}
        return cls(tuple(arms), experiment=plain["experiment"], **plain["search"], _cache=points)

    def differences(self, recorded: "Design") -> list[str]:
        """Return one line per difference from a recorded design. A design may grow."""
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
    """Return at least ``count`` points in [0, 1)^dimensions of a scrambled Sobol sequence.

    The number is a power of two, which balances the sequence. A longer sequence has the same beginning.
    """
    from scipy.stats import qmc  # slow to import, and only the command that makes the design needs it

    engine = qmc.Sobol(dimensions, scramble=True, rng=seed)
    rows: list[list[float]] = engine.random_base2(max(count - 1, 0).bit_length()).tolist()
    return rows


def trial_seed(search_seed: int, repeat: int, index: int) -> int:
    """Return the seed of a trial, in [0, 2^31). All arms share it, so that they can be compared in pairs."""
    return stable_hash(search_seed, repeat, index) % 2**31


def stable_hash(*parts: Any) -> int:
    """Return a 64-bit hash of plain values that is the same in every process."""
    digest = hashlib.sha256(json.dumps(_canonical(parts), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _canonical(value: Any) -> Any:
    """Write equal numbers equally: echo.factor=2 and echo.factor=2.0 are one arm."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def with_value(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of a plain config with the value at a dotted key replaced."""
    name, _, rest = key.partition(".")
    return {**config, name: with_value(config[name], rest, value) if rest else value}


def read_design(folder: Path) -> Design:
    """Return the design in the folder of a sweep.

    Raises:
        FolderError: the folder has no ``design.json``.
    """
    path = folder / "design.json"
    if not path.exists():
        raise FolderError(
            f"{folder}: not the folder of a sweep (no design.json); give the folder that -m printed"
        )
    return Design.from_dict(read_json(path))


def record_design(design: Design, folder: Path) -> None:
    """Write ``design.json``, from which workers take their trials.

    Raises:
        FolderError: the folder contains a different design. More trials or repeats may be added.
    """
    path = folder / "design.json"
    lines = design.differences(read_design(folder)) if path.exists() else []
    if lines:
        shown = "\n  ".join(lines)
        raise FolderError(
            f"{folder}: contains a different design:\n  {shown}\nRun that design, choose another "
            "hydra.sweep.dir=, or start over with restart=true, which keeps the old folder"
        )
    write_json(path, design.to_dict())
