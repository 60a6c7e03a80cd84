"""Reads that wait long for their data say so, by ``logging``, which writes warnings to stderr by default."""

import logging
import os
import threading
import time
from contextlib import suppress
from typing import Protocol

log = logging.getLogger("adaecho.shards")


class Waiting(Protocol):
    """What can wait, and is told for how long it has."""

    tell_after_s: float

    def tell(self, waited_s: float) -> None: ...


class Watch:
    """Looks at all that waits, from one thread, which lives while anything does."""

    def __init__(self) -> None:
        self._lock, self._since = threading.Condition(), dict[Waiting, float]()
        self._watched, self._tick_s = False, 1.0

    def begin(self, waiting: Waiting) -> None:
        with self._lock:
            self._since[waiting] = time.monotonic()
            if waiting.tell_after_s / 4 < self._tick_s:
                self._tick_s = waiting.tell_after_s / 4
                self._lock.notify()
            if not self._watched:
                with suppress(RuntimeError):  # no more threads, or the interpreter ends: reading goes on
                    threading.Thread(target=self._run, name="adaecho-waits", daemon=True).start()
                    self._watched = True

    def end(self, waiting: Waiting) -> None:
        with self._lock:
            self._since.pop(waiting, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait(self._tick_s)
                if not self._since:
                    self._watched = False
                    return
                waits = list(self._since.items())
            for waiting, since in waits:
                if time.monotonic() - since >= waiting.tell_after_s:
                    waiting.tell(time.monotonic() - since)


watch = Watch()
if hasattr(os, "register_at_fork"):  # a child has no thread, and the lock may have been held
    os.register_at_fork(after_in_child=watch.__init__)  # type: ignore[misc]
