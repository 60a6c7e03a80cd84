"""What a type can't say: ranges and choices, refused by name."""

import math

from adaecho.errors import ConfigError


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError where a value is not among those allowed."""
    if value not in allowed:
        raise ConfigError(f"{key}={value}: must be one of {', '.join(allowed)}")


def at_least(key: str, value: int, least: int) -> None:
    """Raises ConfigError where a whole number is too small."""
    if value < least:
        raise ConfigError(f"{key}={value}: must be at least {least}")


def finite_at_least(key: str, value: float, least: float) -> None:
    """Raises ConfigError where a number is too small, infinite or none."""
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}={value}: must be a finite number, at least {least}")
