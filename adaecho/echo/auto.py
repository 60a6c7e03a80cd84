"""``factor="auto"``: an echoing factor that follows the measured R."""

from adaecho.echo.factor import Factor

_EVERY_STEPS = 20
_LEAST_CHANGE = 0.05  # relative: measurement noise alone should not change the factor


class AutoFactor:
    """Sets e = R, the largest factor whose repeats are free (paper, section 2, after equation 1).

    Args:
        max_factor: bound from above; from below it is 1.
    """

    def __init__(self, max_factor: float) -> None:
        self._max_factor = max_factor
        self._steps = 0

    def follow(self, ratio: float | None, factor: Factor) -> None:
        """Called at each step: now and then, set the factor to the ratio."""
        self._steps += 1
        if ratio is None or self._steps % _EVERY_STEPS:
            return
        wanted = round(min(max(ratio, 1.0), self._max_factor), 2)
        if abs(wanted - factor.value) > _LEAST_CHANGE * factor.value:
            factor.change(wanted)
