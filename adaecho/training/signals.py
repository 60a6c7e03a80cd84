"""Signals that end a run: the step ends, the run writes a checkpoint, and the command exits."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)  # Ctrl-C, a scheduler's kill, submitit's time-out


class WaitEndedError(KeyboardInterrupt):
    """A signal ended a wait at once, because nothing would be lost.

    Attributes:
        signal: its name.
    """

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number).name
        super().__init__(f"{self.signal} ended the run")


class Interrupt:
    """Inside the context a signal only sets ``signal``; a second Ctrl-C interrupts at once.

    A handler may run in the middle of an update, so it must not do more. The first signal raises
    ``WaitEndedError`` inside ``waiting``, where nothing can be lost. Outside the main thread Python allows no
    handlers, and nothing changes.

    Attributes:
        signal: number of the first signal; 0 before.
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
        """Let a signal end the block at once, also a signal that came before.

        The block may only wait for data or build objects, so that nothing is lost.
        """
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
        if self._is_waiting or (is_second and number == signal.SIGINT):
            raise WaitEndedError(self.signal)
        if number == signal.SIGINT:
            os.write(2, b"ending after this step; Ctrl-C again ends at once\n")
