"""Handle signals that end a run, so that it completes its step and writes a checkpoint before it exits."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# SIGINT is Ctrl-C, SIGTERM is sent by schedulers, and SIGUSR2 by submitit shortly before a job's time limit.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class WaitEndedError(KeyboardInterrupt):
    """Raised when a signal ends the run immediately, usually while it waits for data."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number).name  # such as "SIGTERM"
        super().__init__(f"{self.signal} ended the run")


class Interrupt:
    """A context manager that records signals, so that the training loop can stop after a step.

    A signal interrupts the running code only in a ``waiting`` block. Ctrl-C after another signal ends the run
    immediately. Only the main thread can record signals.

    Attributes:
        signal: number of the first signal; 0 before any signal.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._is_waiting = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Raise ``WaitEndedError`` as soon as a signal arrives within the ``with`` block."""
        # Use this only around code that may stop at any point, such as waiting for data.
        self._is_waiting = True
        try:
            if self.signal:
                raise WaitEndedError(self.signal)
            yield
        finally:
            self._is_waiting = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_second = self.signal != 0
        # Outside `waiting`, a signal may arrive in the middle of an update, so it is only recorded.
        self.signal = self.signal or number
        if self._is_waiting or (is_second and number == signal.SIGINT):
            raise WaitEndedError(self.signal)
        if number == signal.SIGINT:
            os.write(2, b"ending after this step; Ctrl-C again ends at once\n")
