"""``factor="auto"``: an echoing factor that follows the measured R."""

from adaecho.echo.order.factor import Factor

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

    def due(self) -> bool:
        """Called at each step: whether it is time to look at the ratio."""
        self._steps += 1
        return not self._steps % _EVERY_STEPS

    def follow(self, ratio: float | None, factor: Factor) -> None:
        """Set the factor to the ratio; None where that isn't known yet."""
        if ratio is None:
            return
        wanted = round(min(max(ratio, 1.0), self._max_factor), 2)
        if abs(wanted - factor.value) > _LEAST_CHANGE * factor.value:
            factor.change(wanted)
