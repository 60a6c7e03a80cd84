"""Search axes: a range of one config key in Hydra's sweep grammar, and its map from the unit interval.

optimizer.learning_rate: tag(log, interval(0.01, 1))         log-uniform
optimizer.momentum:      tag(reverse_log, interval(0.5, 0.98))   1 - m is log-uniform
schedule.decay_steps:    tag(times_factor, interval(1e4, 1.5e5))  both bounds times echo.factor
"""

import math
from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException

from adaecho.config.identity import BUDGETS
from adaecho.config.schema import Config
from adaecho.config.tasks import TaskConfig
from adaecho.errors import ConfigError

SCALES = ("linear", "log", "reverse_log")
TIMES_FACTOR = "times_factor"
_EXAMPLE = "write e.g. tag(log, interval(0.01, 1))"
# What all trials of an arm share, so that they can be compared: how long, on what, measured how.
_SHARED = ("seed", "threads", "fresh", "checkpoint_every_s", "echo.factor", *BUDGETS)
_SHARED_GROUPS = ("search", "tracking", "target", "evaluate", "data")


@dataclass(frozen=True)
class Axis:
    """One range of a search: ``value(u)`` maps u in [0, 1) to [low, high].

    Attributes:
        key: dotted config key.
        low, high: bounds, already multiplied by the echoing factor where the tag times_factor asks for it.
        scale: linear; log (log x uniform); reverse_log (log(1 - x) uniform: for momentum, whose distance
            from 1 is what matters).
        integer: values are rounded to whole numbers, because the key's type is int.
    """

    key: str
    low: float
    high: float
    scale: str = "linear"
    integer: bool = False

    def value(self, u: float) -> float | int:
        """The value at position ``u`` of the axis, as a plain Python number."""
        if self.scale == "log":
            value = self.low * (self.high / self.low) ** u
        elif self.scale == "reverse_log":
            value = 1 - (1 - self.low) * ((1 - self.high) / (1 - self.low)) ** u
        else:
            value = self.low + (self.high - self.low) * u
        value = min(max(value, self.low), self.high)
        return round(value) if self.integer else float(value)

    def position(self, value: float) -> float:
        """The inverse of ``value``: where on the axis a value lies, 0 at low and 1 at high."""
        if self.scale == "log":
            return math.log(value / self.low) / math.log(self.high / self.low)
        if self.scale == "reverse_log":
            return math.log((1 - value) / (1 - self.low)) / math.log((1 - self.high) / (1 - self.low))
        return (value - self.low) / (self.high - self.low)

    def to_dict(self) -> dict[str, Any]:
        """The axis as ``design.json`` holds it."""
        return {"low": self.low, "high": self.high, "scale": self.scale, "integer": self.integer}


def parse(key: str, text: str, factor: Any = 1, options: type[TaskConfig] = TaskConfig) -> Axis:
    """The axis that ``text`` describes for an arm with this echoing factor.

    Args:
        key: dotted config key that the axis varies.
        text: Hydra's sweep grammar: ``interval(low, high)``, with the tags log, reverse_log, times_factor.
        factor: ``echo.factor`` of the arm; multiplies the bounds of a times_factor axis.
        options: of the arm's task, whose fields are the keys ``task.*``.

    Raises:
        ConfigError: the text is not an interval, a tag is unknown, low >= high, a bound the scale can't
            take, or times_factor without a number as factor.
    """
    try:
        sweep = OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException as error:
        raise ConfigError(f"search.axes: {key}: {text!r} can't be read: {error}; {_EXAMPLE}") from error
    if not isinstance(sweep, IntervalSweep):
        raise ConfigError(f"search.axes: {key}: {text!r} is not an interval; {_EXAMPLE}")
    return from_interval(key, sweep, factor, options)


def from_interval(
    key: str, sweep: IntervalSweep, factor: Any = 1, options: type[TaskConfig] = TaskConfig
) -> Axis:
    """The axis of a parsed interval; see ``parse``."""
    assert sweep.start is not None
    assert sweep.end is not None
    scale = _scale(key, sweep.tags)
    low, high = float(sweep.start), float(sweep.end)
    if TIMES_FACTOR in sweep.tags:
        if not isinstance(factor, int | float):
            raise ConfigError(
                f"search.axes: {key}: its bounds scale with echo.factor, which is {factor!r}; "
                "give the arm a number as factor, or the axis an interval without times_factor"
            )
        low, high = low * factor, high * factor
    integer = _is_integer(key, options)
    if integer and low < high:
        low, high = math.ceil(low), math.floor(high)
    axis = Axis(key, low, high, scale, integer)
    _check_bounds(axis)
    return axis


def _scale(key: str, tags: set[str]) -> str:
    unknown = tags - {"log", "reverse_log", TIMES_FACTOR}
    if unknown:
        raise ConfigError(
            f"search.axes: {key}: unknown tag {sorted(unknown)[0]}; known are log, reverse_log, times_factor"
        )
    if {"log", "reverse_log"} <= tags:
        raise ConfigError(f"search.axes: {key}: log and reverse_log exclude each other; keep one")
    return next((tag for tag in SCALES if tag in tags), "linear")


def _check_bounds(axis: Axis) -> None:
    where = f"search.axes: {axis.key}: interval({axis.low:g}, {axis.high:g})"
    if not (math.isfinite(axis.low) and math.isfinite(axis.high)):
        raise ConfigError(f"{where}: both bounds must be finite numbers")
    if axis.low >= axis.high:
        raise ConfigError(
            f"{where}: the lower bound must be below the upper one; to fix a key, set it instead"
        )
    if axis.scale == "log" and axis.low <= 0:
        raise ConfigError(
            f"{where}: a log axis needs positive bounds; raise {axis.low:g} or drop the tag log"
        )
    if axis.scale == "reverse_log" and axis.high >= 1:
        raise ConfigError(f"{where}: a reverse_log axis needs bounds below 1; lower {axis.high:g}")


def _is_integer(key: str, options: type[TaskConfig]) -> bool:
    if key in _SHARED or key.partition(".")[0] in _SHARED_GROUPS:
        raise ConfigError(
            f"search.axes: {key}: is the same for all trials of an arm, or they could not be compared; give "
            "it one value, or make arms of it (search.arms, or a comma list)"
        )
    kind: Any = Config
    for name in key.split("."):
        fields = get_type_hints(kind) if is_dataclass(kind) else {}
        if name not in fields:
            raise ConfigError(f"search.axes: {key}: the config has no such key; see --cfg job for the keys")
        kind = options if kind is Config and name == "task" else fields[name]
    if kind not in (int, int | None, float, float | None, Any):
        raise ConfigError(
            f"search.axes: {key}: only a number can be searched; sweep it as a comma list instead"
        )
    return kind in (int, int | None)
