"""Check ranges and choices, with error messages that name the config key."""

import math

from adaecho.errors import ConfigError


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError if the value of a key is not one of the allowed values."""
    if value not in allowed:
        raise ConfigError(f"{key}={value}: must be one of {', '.join(allowed)}")


def within(key: str, value: float | None, interval: str) -> None:
    """Raise ConfigError if a value lies outside an interval such as ``[0, 1)``. None is accepted."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    if value is None or low < value < high or (value == low and interval[0] == "["):
        return
    if value == high and interval[-1] == "]":
        return
    words = f"{'at least' if interval[0] == '[' else 'greater than'} {low:g}"
    raise ConfigError(f"{key}={value}: must {f'be {words}' if math.isinf(high) else f'lie in {interval}'}")
