"""The threads of one loader: started together, paused together, stopped together."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from adaecho.echo.threads.workers import OrderedMap


class Interrupted(BaseException):  # a signal between threads that no handler of errors should catch
    """The crew is stopping; whoever waits gives up and can ask again later."""


class Helper(Protocol):
    """Something that belongs to one thread."""

    def __call__(self, *arguments: Any) -> Any:
        """Ask it."""

    def close(self) -> None:
        """End it."""


class CrewThread(threading.Thread):
    """A thread of a crew; what ``helper`` holds is closed when it ends.

    It is ``leaving``, under the crew's lock, from when it will do no more work: still alive, but another
    must be hired in its place.
    """

    def __init__(self, crew: "Crew", target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.crew = crew
        self.helper: Helper | None = None
        self.leaving = False

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self.helper is not None:
                self.helper.close()

    def rest(self, seconds: float) -> None:
        """Sleep, no longer than until the crew is to stop.

        Raises:
            Interrupted: it is to stop.
        """
        condition = self.crew.condition
        with condition:
            if condition.wait_for(lambda: self.crew.stopping, seconds):
                raise Interrupted


class Crew:
    """What the threads of one loader share: one lock, and whether to work, pause or stop.

    Each map has a condition of its own on that lock: waking threads that have nothing to do would take the
    interpreter's lock from the training step.

    Args:
        stopped: called after a stop, once no thread works any more; must not wait for anything.

    Attributes:
        condition: for whoever waits for a pause or a stop.
    """

    def __init__(self, stopped: Callable[[], None]) -> None:
        self._stopped = stopped
        self._lock = threading.RLock()
        self.condition = threading.Condition(self._lock)
        self.stopping = False
        self.paused = False
        self._paused_by: int | None = None
        self._active = 0
        self._staffed = False  # no thread is missing
        self._maps: list[OrderedMap[Any, Any]] = []

    def add(self, ordered: "OrderedMap[Any, Any]") -> threading.Condition:
        """Take a map's threads into the crew; the condition on which they wait for each other."""
        self._maps.append(ordered)
        return threading.Condition(self._lock)

    def staff(self, ordered: "OrderedMap[Any, Any]", threads: int) -> None:
        """Have another number of threads for a map from the next ``go`` on."""
        with self.condition:
            ordered.wanted, self._staffed = threads, False

    def go(self) -> None:
        """Start the threads that are missing."""
        with self.condition:
            if self._staffed:
                return
            self.stopping, self._staffed = False, True
            for ordered in self._maps:
                ordered.hire()

    def stop(self) -> None:
        """Let every thread end once the work in its hands is done; what is finished is kept for later."""
        with self.condition:
            self.stopping, self._staffed = True, False
            self._wake_all()
            self._tell_if_stopped()

    def join(self) -> None:
        """Wait for the threads after ``stop``."""
        for ordered in self._maps:
            ordered.join()

    def pause(self) -> None:
        """Return once no thread works; those that wait go on waiting until ``resume``."""
        with self.condition:
            if not self.paused:
                self.paused, self._paused_by = True, threading.get_ident()
            try:
                self.condition.wait_for(lambda: self._active == 0)
            except BaseException:  # Ctrl-C: whoever goes on must not wait for a resume
                self.resume()
                raise

    def resume(self) -> None:
        """End a pause."""
        with self.condition:
            self.paused = False
            self._wake_all()

    def check_not_paused_by_caller(self) -> None:
        """Raises RuntimeError where the thread that has paused the crew would wait for its work."""
        if self.paused and self._paused_by == threading.get_ident():
            raise RuntimeError(
                "inside `with loader.paused()` no thread works that could make the next batch: "
                "ask for it before or after that block"
            )

    def _wake_all(self) -> None:
        self.condition.notify_all()
        for ordered in self._maps:
            ordered.changed.notify_all()

    def wait_until(self, changed: threading.Condition, ready: Callable[[], bool]) -> None:
        """Wait as a crew thread that is at work (the lock held); raises Interrupted on stopping."""
        if ready() and not self.paused and not self.stopping:
            return
        self._leave()
        try:
            changed.wait_for(lambda: self.stopping or (ready() and not self.paused))
        finally:
            self._active += 1
        if self.stopping:
            raise Interrupted

    def enter(self) -> None:
        """Count this thread as working (the lock held)."""
        self._active += 1

    def quit(self, thread: "CrewThread") -> None:
        """This thread will do no more work: another may have to be hired in its place (the lock held)."""
        thread.leaving, self._staffed = True, False
        self._leave()
        self._tell_if_stopped()

    def _tell_if_stopped(self) -> None:
        if self.stopping and not any(ordered.at_work for ordered in self._maps):
            self._stopped()

    def _leave(self) -> None:
        self._active -= 1
        if not self._active:
            self.condition.notify_all()
