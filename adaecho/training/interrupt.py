"""Signals that ask a run to end well: the step ends, a checkpoint is written, and the command exits."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

# A batch that is nearly there is worth waiting for; one from a server that drips may never come.
WAIT_S = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)  # Ctrl-C, a scheduler's kill, submitit's time-out


class WaitEndedError(KeyboardInterrupt):
    """Raised where nothing would be lost; names the signal that asked the run to end.

    That is before it has begun, and where it waits for a batch, ``WAIT_S`` after the signal.
    """

    def __init__(
        self, first: signal.Signals | None, where: str = "the wait for data that did not come"
    ) -> None:
        super().__init__(f"a signal ended {where}")
        self.signal = None if first is None else first.name


class Interrupt:
    """While inside the context, the first signal only sets a flag; a second Ctrl-C interrupts at once.

    Nothing is done in the handler itself: it runs between bytecodes, in the middle of an update. The waits
    for a batch and for threads at rest alone are ended from there, if they outlast the signal by ``WAIT_S``.
    Outside the main thread, where Python allows no handlers, the flag is never set.

    Attributes:
        signal: the first that came.
        is_setting_up: nothing has been done that could be lost, so the first signal ends it at once; set by
            its user.
        is_waiting: says whether the main thread waits for the loader; set by its user.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.is_setting_up = False
        self.is_waiting: Callable[[], bool] = lambda: False
        self._wait_is_over = self._is_over = False
        self._timer: threading.Timer | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def __call__(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.is_setting_up:
            self.signal = signal.Signals(number)
            raise WaitEndedError(self.signal, "the run before its first step")
        if self._wait_is_over:
            if self.is_waiting():
                raise WaitEndedError(self.signal)
            if number == signal.SIGUSR2:  # from _end_wait, when the batch had just come
                return
        if self.signal is None:
            self._ask_to_end(signal.Signals(number))
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _ask_to_end(self, first: signal.Signals) -> None:
        self.signal = first
        if first == signal.SIGINT:
            os.write(2, b"ending after this step; Ctrl-C again ends at once\n")
        self._start_timer()

    def _start_timer(self) -> None:
        if self._is_over:
            return
        self._timer = threading.Timer(WAIT_S, self._end_wait)
        self._timer.daemon = True
        self._timer.start()

    def _end_wait(self) -> None:
        """Have the handler run again, in the main thread; and later, should it wait for something else."""
        self._wait_is_over = True
        main = threading.main_thread().ident
        if main is not None and self.is_waiting():
            signal.pthread_kill(main, signal.SIGUSR2)
        self._start_timer()
