"""The design of a sweep, and its record: which arms, and for each its points by index, before anything runs.

A point is a function of (search seed, content of the arm, repeat, index) alone: scrambled Sobol points, as
scipy implements them, whose seed is a hash of the first three. Nothing depends on the order of arms or of
events, so workers need no coordination and a sequence can be extended when a trial diverges.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaecho.config.identity import BUDGETS, differences, identity, smaller_budgets
from adaecho.config.tasks import names_in
from adaecho.errors import FolderError
from adaecho.records.files import read_json, write_json
from adaecho.records.trials import check_name
from adaecho.search.axes import Axis

# Where a trial runs, not what it computes: these leave an arm's points as they are.
_NOT_CONTENT = ("seed", "device", "precision", "channels_last", "threads")


MAX_TRIALS = 100_000  # of a sweep: each has a folder
_SEARCH = ("seed", "trials", "repeats", "max_diverged", "prune")  # what all searches of a sweep share
_GROWING = ("trials", "repeats", "max_diverged")
_MAX_LINES = 8  # of what differs


@dataclass(frozen=True)
class Arm:
    """One configuration under comparison: a resolved config, and the axes along which it is tuned.

    Attributes:
        name: its folder below the sweep's.
        overrides: what composed it, on top of the defaults.
        config: the plain resolved config; the values at the axes' keys are replaced in each trial.
    """

    name: str
    overrides: tuple[str, ...]
    config: dict[str, Any]
    axes: tuple[Axis, ...] = ()

    def content(self) -> dict[str, Any]:
        """What decides the arm's points: its identity without seed, axes' own values, and where it runs."""
        kept = {key: value for key, value in identity(self.config).items() if key not in _NOT_CONTENT}
        kept["data"] = {key: value for key, value in kept["data"].items() if key != "path"}
        for axis in self.axes:
            kept = with_value(kept, axis.key, None)
        return {"config": kept, "axes": {axis.key: axis.to_dict() for axis in self.axes}}

    def to_dict(self) -> dict[str, Any]:
        """What the arm computes: two arms that agree in this are one."""
        return {
            "config": {**identity(self.config), **{key: self.config.get(key) for key in BUDGETS}},
            "axes": {axis.key: axis.to_dict() for axis in self.axes},
        }


@dataclass(frozen=True)
class TrialId:
    """Names a trial; also its folder, ``<arm>/<repeat>/<index>``."""

    arm: str
    repeat: int
    index: int

    def __str__(self) -> str:
        return f"{self.arm}/{self.repeat}/{self.index}"


@dataclass(frozen=True)
class Design:
    """All searches of a sweep: every arm, ``repeats`` times, ``trials`` non-divergent points each.

    Attributes:
        seed: of the whole study (search.seed).
        trials: non-divergent trials of each search.
        repeats: independent searches of each arm.
        max_diverged: how many diverged trials of a search are replaced by further points.
        prune: whether a trial ends that can't be its search's best any more.
        experiment: its name, if it has one.
    """

    arms: tuple[Arm, ...]
    seed: int
    trials: int
    repeats: int
    max_diverged: int
    prune: bool = False
    experiment: str = ""
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def named(self) -> list[str]:
        """What its arms name that may be a module of somebody's own, each once."""
        return list(dict.fromkeys(name for arm in self.arms for name in names_in(arm.config)))

    def searches(self) -> list[tuple[Arm, int]]:
        """Every (arm, repeat), repeat by repeat so that early results cover all arms."""
        return [(arm, repeat) for repeat in range(self.repeats) for arm in self.arms]

    def point(self, arm: Arm, repeat: int, index: int) -> dict[str, float | int]:
        """The hyper-parameters of a trial: config key to value."""
        if not arm.axes:
            return {}
        points = self._cache.get((arm.name, repeat), [])
        if index >= len(points):
            rows = sobol(
                stable_hash(self.seed, arm.content(), repeat), len(arm.axes), max(index + 1, self.trials)
            )
            points = [[axis.value(u) for axis, u in zip(arm.axes, row, strict=True)] for row in rows]
            self._cache[arm.name, repeat] = points
        return {axis.key: value for axis, value in zip(arm.axes, points[index], strict=True)}

    def trial_config(self, arm: Arm, repeat: int, index: int) -> dict[str, Any]:
        """The plain config of a trial: the arm's, with its point and its seed."""
        config = arm.config
        for key, value in self.point(arm, repeat, index).items():
            config = with_value(config, key, value)
        return {**config, "seed": trial_seed(self.seed, repeat, index), "fresh": False}

    def trial_overrides(self, arm: Arm, repeat: int, index: int) -> list[str]:
        """The overrides that compose a trial's config by hand: the arm's, its point, its seed."""
        point = [f"{key}={value!r}" for key, value in self.point(arm, repeat, index).items()]
        return [*arm.overrides, *point, f"seed={trial_seed(self.seed, repeat, index)}"]

    def to_dict(self) -> dict[str, Any]:
        """The record ``design.json``: all that a worker needs, the points included."""
        return {
            "experiment": self.experiment,
            "search": {name: getattr(self, name) for name in _SEARCH},
            "arms": {arm.name: self._arm_to_dict(arm) for arm in self.arms},
        }

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Design":
        """The design of a ``design.json``.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: it is no design.
        """
        total = max(len(plain["arms"]), 1)
        for name, least in (("trials", 1), ("repeats", 1), ("max_diverged", 0), ("seed", 0)):
            number = plain["search"][name]
            total *= number if least else 1
            if type(number) is not int or number < least or total > MAX_TRIALS:
                raise ValueError(f"search.{name} is {number!r}")
        arms = [
            Arm(
                check_name("arm", name),
                tuple(arm["overrides"]),
                arm["config"],
                tuple(Axis(key, **axis) for key, axis in arm["axes"].items()),
            )
            for name, arm in plain["arms"].items()
        ]
        points = {
            (name, repeat): rows
            for name, arm in plain["arms"].items()
            for repeat, rows in enumerate(arm["points"])
        }
        for arm in arms:  # what is missing would be drawn, of as many axes as anybody writes
            for repeat in range(plain["search"]["repeats"] if arm.axes else 0):
                if len(points.get((arm.name, repeat), ())) < plain["search"]["trials"]:
                    raise ValueError(f"arms.{arm.name}: lacks points of its repeat {repeat}")
        return cls(tuple(arms), experiment=plain["experiment"], **plain["search"], _cache=points)

    def _arm_to_dict(self, arm: Arm) -> dict[str, Any]:
        points = []
        for repeat in range(self.repeats if arm.axes else 0):
            self.point(arm, repeat, self.trials - 1)
            points.append(self._cache[arm.name, repeat])
        return {**arm.to_dict(), "overrides": list(arm.overrides), "config": arm.config, "points": points}


def sobol(seed: int, dimensions: int, count: int) -> list[list[float]]:
    """At least ``count`` points in [0, 1)^dimensions of the scrambled Sobol sequence of this seed.

    A whole power of two, because that is how the sequence is balanced; a prefix of it is the same sequence.
    """
    from scipy.stats import qmc  # takes a second or two: the workers start meanwhile

    engine = qmc.Sobol(dimensions, scramble=True, rng=seed)
    rows: list[list[float]] = engine.random_base2(max(count - 1, 0).bit_length()).tolist()
    return rows


def trial_seed(search_seed: int, repeat: int, index: int) -> int:
    """The seed of a trial, in [0, 2^31): the same for all arms, so that they are compared pairwise."""
    return stable_hash(search_seed, repeat, index) % 2**31


def stable_hash(*parts: Any) -> int:
    """A 64-bit hash of plain values that is the same in every process."""
    digest = hashlib.sha256(json.dumps(_canonical(parts), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _canonical(value: Any) -> Any:
    """Equal values in one spelling: echo.factor=2 and echo.factor=2.0 are one arm."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def with_value(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of a plain config with one dotted key replaced; untouched parts are shared."""
    name, _, rest = key.partition(".")
    return {**config, name: with_value(config[name], rest, value) if rest else value}


def record_design(design: Design, folder: Path) -> None:
    """Write ``design.json``: from now on workers find trials to run. Tables of a shorter design go."""
    path, plain = folder / "design.json", design.to_dict()
    if path.exists() and read_json(path) != json.loads(json.dumps(plain)):
        for table in ("trials.json", "outcome.json"):
            (folder / table).unlink(missing_ok=True)
    write_json(path, plain)


class OtherDesignError(FolderError):
    """The folder holds another design."""


def check_design(design: Design, folder: Path) -> None:
    """Check that the folder holds no other design; more trials or repeats may be added.

    Raises:
        OtherDesignError: it does (with a diff).
        FolderError: it holds trials of an unknown one.
    """
    path = folder / "design.json"
    has_trials = (folder / "trials.json").exists() or any(folder.glob("*/*/*/config.yaml"))
    if has_trials and not path.exists():
        raise FolderError(
            f"{folder}: holds trials but no design.json, so it can't be told of which sweep; choose another "
            "hydra.sweep.dir=, or fresh=true to start anew and keep the old folder beside it",
        )
    if path.exists():
        now, recorded = design.to_dict(), read_json(path)
        _checked(recorded, path)
        refused = _differences(recorded, now)
        if refused:
            shown = refused[:_MAX_LINES]
            if len(refused) > _MAX_LINES:
                shown.append(f"and {len(refused) - _MAX_LINES} more")
            raise OtherDesignError(
                f"{folder}: holds another design:\n  "
                + "\n  ".join(shown)
                + "\nRun that design again, choose "
                "another hydra.sweep.dir=, or fresh=true to start anew and keep the old folder beside it",
            )


def check_unchanged(design: Design, folder: Path) -> None:
    """Check that the design a worker has read is still the folder's, which may have more trials by now.

    Raises:
        FolderError: another sweep has begun in the folder since.
    """
    refused = _differences(design.to_dict(), read_design(folder).to_dict())
    if refused:
        raise FolderError(
            f"{folder}: another sweep has begun there since this worker read what to run ({refused[0]}); it "
            "ends, and what it had of the earlier one is kept beside"
        )


def read_design(folder: Path) -> Design:
    """The design that a sweep's folder records.

    Raises:
        FolderError: no sweep was begun there, or its record is damaged.
    """
    path = folder / "design.json"
    if not path.exists():
        raise FolderError(f"{folder}: no sweep, for it has no design.json; give the folder that -m printed")
    return _checked(read_json(path), path)


def _checked(plain: dict[str, Any], path: Path) -> Design:
    try:
        design = Design.from_dict(plain)
        design.named()
        for arm in design.arms:
            arm.content()
            design.trial_config(arm, 0, 0)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FolderError(
            f"{path}: is no sweep's design ({type(error).__name__}: {error}). Restore it, or start anew with "
            "fresh=true"
        ) from error
    return design


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What may not change, as lines: all but budgets, spelling, and points that a longer design has more of.

    What differs in every arm is told once.
    """
    names = [set(plain["arms"]) for plain in (old, new)]
    common = sorted(names[0] & names[1])
    pairs = {name: [_compared(name, plain["arms"][name]) for plain in (old, new)] for name in common}
    lines = smaller_budgets(old["search"], new["search"], _GROWING)
    for name in ("seed", "prune"):
        was, now = ({f"search.{name}": plain["search"].get(name, False)} for plain in (old, new))
        lines += differences(was, now)
    if names[0] != names[1]:
        gone, added = sorted(names[0] - names[1]), sorted(names[1] - names[0])
        lines.append(f"arms: {gone} in the folder, {added} now")
    by_arm = {name: differences(*pair) for name, pair in pairs.items()}
    everywhere: list[str] = []
    if len(common) > 1:
        everywhere = [line for line in by_arm[common[0]] if all(line in by_arm[name] for name in common)]
    lines += [f"every arm's {line}" for line in everywhere]
    lines += [f"{name}.{line}" for name in common for line in by_arm[name] if line not in everywhere]
    if not lines:  # they follow from the rest, as long as the code that draws them is the same
        firsts = [{name: plain["arms"][name]["points"][:1] for name in common} for plain in (old, new)]
        drawn = [{name: points[0][0] for name, points in first.items() if points} for first in firsts]
        lines = [f"first point of {line}" for line in differences(*drawn)]
    return lines


def _compared(name: str, plain: dict[str, Any]) -> dict[str, Any]:
    axes = tuple(Axis(key, **axis) for key, axis in plain["axes"].items())
    return Arm(name, (), plain["config"], axes).to_dict()
