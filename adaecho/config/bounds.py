"""What a type can't say: ranges and choices, refused by name."""

import math

from adaecho.errors import ConfigError

_MOST = 2**53  # whole numbers up to here survive JSON, and every library's integers


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError where a value is not among those allowed."""
    if value not in allowed:
        raise ConfigError(f"{key}={value}: must be one of {', '.join(allowed)}")


def at_least(key: str, value: float | None, least: float) -> None:
    """Raises ConfigError where a number is too small or beyond 2^53; null, where the key may be, passes."""
    if value is not None and value < least:
        raise ConfigError(f"{key}={value}: must be at least {least}")
    if value is not None and value > _MOST:
        raise ConfigError(f"{key}={value}: must be at most 2^53, {_MOST}")


def positive(key: str, value: float | None, null: str = "") -> None:
    """Raises ConfigError where a number is not positive and finite; ``null`` says what null means."""
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{key}={value}: must be a positive number{'; null ' * bool(null)}{null}")


def within(key: str, value: float, interval: str) -> None:
    """Raises ConfigError where a number lies outside of an interval from 0 to 1, such as ``[0, 1)``."""
    low = value >= 0 if interval[0] == "[" else value > 0
    if not (low and (value <= 1 if interval[-1] == "]" else value < 1)):
        raise ConfigError(f"{key}={value}: must lie in {interval}")


def finite_at_least(key: str, value: float, least: float) -> None:
    """Raises ConfigError where a number is too small, infinite or none."""
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}={value}: must be a finite number, at least {least}")


def check_depth(depth: int) -> int:
    """Blocks per stage n of a ResNet for CIFAR, which has 6n + 2 layers.

    Raises:
        ConfigError: there is no net of that depth.
    """
    blocks_per_stage, rest = divmod(depth - 2, 6)
    if rest or blocks_per_stage < 1:
        raise ConfigError(f"depth={depth}: these nets have 6n + 2 layers; choose 8, 14, 20, 26, 32, 44 or 56")
    return blocks_per_stage
