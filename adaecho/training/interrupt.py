"""Signals that ask a run to end well: the step ends, a checkpoint is written, and the command exits."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)  # Ctrl-C, a scheduler's kill, submitit's time-out


class WaitEndedError(KeyboardInterrupt):
    """A signal, which ``signal`` names, ended at once what could be ended without a loss."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number).name
        super().__init__(f"{self.signal} ended the run")


class Interrupt:
    """While inside the context, a signal only sets ``signal``; a second Ctrl-C interrupts at once.

    The handler runs between bytecodes, in the middle of an update, so it does nothing more. But where nothing
    has been done that could be lost, the first signal raises ``WaitEndedError``: before training begins
    (``has_begun``), and in a wait for data (``waiting``), which may never come. Outside the main thread,
    where Python allows no handlers, nothing is changed.

    Attributes:
        signal: number of the first that came; 0 before.
        has_begun: whether training has; set by the user of the class.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.has_begun = self._is_waiting = False
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
        """Inside, the run waits for data, which a signal ends, also one that came before."""
        self._is_waiting = True
        try:
            if self.signal:
                raise WaitEndedError(self.signal)
            yield
        finally:
            self._is_waiting = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_second = self.signal != 0
        self.signal = self.signal or number
        if not self.has_begun or self._is_waiting or (is_second and number == signal.SIGINT):
            raise WaitEndedError(self.signal)
        if number == signal.SIGINT:
            os.write(2, b"ending after this step; Ctrl-C again ends at once\n")
