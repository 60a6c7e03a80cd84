"""Examples of a data set that are skipped as it is read into arrays or a cache."""

from adaecho.errors import DataError, warn
from adaecho.masking import presentable


class SkippedExamples:
    """Examples that can't be used: skipped and listed within a budget, an error beyond it.

    Args:
        budget: ``data.max_bad_examples``.
        at_once: say each as it is met, as of a stream; else all of them at ``report``.
    """

    def __init__(self, budget: int, *, at_once: bool = False) -> None:
        self._budget, self._at_once = budget, at_once
        self._found: list[str] = []

    def add(self, origin: str, reason: str) -> None:
        """Count one more.

        Args:
            origin: file and row.
            reason: why it can't be used.

        Raises:
            DataError: it exceeds the budget.
        """
        self._found.append(presentable(f"{origin}: {reason}"))
        if len(self._found) > self._budget:
            listed = "\n  ".join(self._found)
            raise DataError(
                f"more bad examples than data.max_bad_examples={self._budget} allows to skip:\n  {listed}\n"
                "Mend the files, or allow more to be skipped"
            )
        if self._at_once:
            warn(f"bad example skipped: {self._found[-1]}")

    @property
    def count(self) -> int:
        """How many were skipped."""
        return len(self._found)

    def report(self) -> None:
        """Say on stderr which were skipped."""
        for found in self._found:
            warn(f"bad example skipped: {found}")
