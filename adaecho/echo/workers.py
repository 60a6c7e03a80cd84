"""Background threads: ordered, bounded, parallel maps that can pause, stop and go on without losing anything.

Threads, not processes: reading, decoding and NumPy or torch kernels release the interpreter's lock.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

Claim = TypeVar("Claim")
Result = TypeVar("Result")


class Interrupted(Exception):  # noqa: N818 (a signal between threads, not an error)
    """The crew is stopping; whoever waits gives up and can ask again later."""


class Helper(Protocol):
    """Something that belongs to one thread."""

    def __call__(self, *arguments: Any) -> Any:
        """Ask it."""

    def close(self) -> None:
        """End it."""


class CrewThread(threading.Thread):
    """A thread of a crew; what ``helper`` holds is closed when it ends."""

    helper: Helper | None = None

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self.helper is not None:
                self.helper.close()


class Crew:
    """What the threads of one loader share: one lock, and whether to work, pause or stop."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.stopping = False
        self.paused = False
        self._active = 0
        self._maps: list[OrderedMap[Any, Any]] = []

    def add(self, ordered: "OrderedMap[Any, Any]") -> None:
        """Take a map's threads into the crew."""
        self._maps.append(ordered)

    def go(self) -> None:
        """Start the threads that are missing."""
        with self.condition:
            self.stopping = False
            for ordered in self._maps:
                ordered.hire()

    def stop(self) -> None:
        """Let every thread end once the work in its hands is done; what is finished is kept for later."""
        with self.condition:
            self.stopping = True
            self.condition.notify_all()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the threads after ``stop``."""
        for ordered in self._maps:
            ordered.join(timeout_s)

    def pause(self) -> None:
        """Return once no thread works; those that wait go on waiting until ``resume``."""
        with self.condition:
            self.paused = True
            self.condition.wait_for(lambda: self._active == 0)

    def resume(self) -> None:
        """End a pause."""
        with self.condition:
            self.paused = False
            self.condition.notify_all()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait as a crew thread that is at work (the condition held); raises Interrupted on stopping."""
        if ready() and not self.paused and not self.stopping:
            return
        self._active -= 1
        self.condition.notify_all()
        try:
            self.condition.wait_for(lambda: self.stopping or (ready() and not self.paused))
        finally:
            self._active += 1
        if self.stopping:
            raise Interrupted

    def enter(self) -> None:
        """Count this thread as working (the condition held)."""
        self._active += 1

    def leave(self) -> None:
        """Count this thread as resting (the condition held)."""
        self._active -= 1
        self.condition.notify_all()


class InlineMap(Generic[Claim, Result]):
    """``work(claim())`` in the thread that asks."""

    def __init__(self, claim: Callable[[], Claim | None], work: Callable[[Claim], Result]) -> None:
        self._claim, self._work = claim, work
        self.busy_s = 0.0
        self.blocked_s = 0.0
        self.upstream: AnyMap | None = None

    def get(self, *, by_crew: bool) -> Result | None:  # noqa: ARG002 (as OrderedMap)
        """The next result; None after the last."""
        start = time.perf_counter()
        before = 0.0 if self.upstream is None else self.upstream.blocked_s
        claim = self._claim()
        result = None if claim is None else self._work(claim)
        spent = time.perf_counter() - start
        self.blocked_s += spent
        self.busy_s += spent - (0.0 if self.upstream is None else self.upstream.blocked_s - before)
        return result


class OrderedMap(Generic[Claim, Result]):
    """``work(claim())`` in several threads, delivered in the order of the claims.

    Args:
        crew: whom the threads belong to.
        claim: the next piece of work, or None when there is no more; called by one thread at a time.
        work: what to do with it; called in parallel.
        threads: how many.
        window: pieces claimed and not yet delivered, at most.
    """

    def __init__(
        self,
        crew: Crew,
        claim: Callable[[], Claim | None],
        work: Callable[[Claim], Result],
        *,
        threads: int,
        window: int,
        name: str,
    ) -> None:
        self._crew, self._claim, self._work = crew, claim, work
        self._wanted, self._window, self._name = threads, max(window, 1), name
        self._threads: list[threading.Thread] = []
        self._claiming = False
        self._claimed = 0
        self._delivered = 0
        self._ended = False
        self._results: dict[int, tuple[bool, Any]] = {}
        self.busy_s = 0.0
        self.blocked_s = 0.0  # of those who waited here
        # Whom claims wait for: that time is not busy.
        self.upstream: AnyMap | None = None
        crew.add(self)

    def reset(self) -> None:
        """Forget everything claimed, after the threads have ended."""
        self._claimed = self._delivered = 0
        self._ended = self._claiming = False
        self._results.clear()

    def hire(self) -> None:
        """Start missing threads (the crew's condition held)."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        missing = 0 if self._ended else self._wanted - len(self._threads)
        for _ in range(missing):
            thread = CrewThread(target=self._run, name=f"adaecho-{self._name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self, timeout_s: float | None) -> None:
        """Wait for the threads to end."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def get(self, *, by_crew: bool) -> Result | None:
        """The next result; None after the last. Raises what claim or work raised for it.

        Args:
            by_crew: the caller is a thread of the same crew, which pauses and stops with it.
        """
        crew = self._crew
        with crew.condition:
            if by_crew:
                start = time.perf_counter()
                crew.wait_until(self._is_ready)
                self.blocked_s += time.perf_counter() - start
            else:
                crew.condition.wait_for(lambda: self._is_ready() or crew.stopping)
                if not self._is_ready():
                    raise Interrupted
            if self._delivered not in self._results:
                return None
            good, result = self._results[self._delivered]
            if not good:
                raise result  # and again for whoever asks again
            del self._results[self._delivered]
            self._delivered += 1
            crew.condition.notify_all()
            return result  # type: ignore[no-any-return]

    def _is_ready(self) -> bool:
        return self._delivered in self._results or (self._ended and self._delivered == self._claimed)

    def _may_claim(self) -> bool:
        return self._ended or (not self._claiming and self._claimed - self._delivered < self._window)

    def _run(self) -> None:
        condition = self._crew.condition
        try:
            with condition:
                self._crew.enter()
                try:
                    while self._step():
                        pass
                except Interrupted:
                    pass
                finally:
                    self._crew.leave()
        except BaseException as error:  # the interpreter is going down, or a bug here: never a silent hang
            with condition:
                self._fail(error)
            raise

    def _step(self) -> bool:
        """Claim and do one piece (the condition held on entry and exit); False when there is no more."""
        self._crew.wait_until(self._may_claim)
        if self._ended:
            return False
        self._claiming = True
        number = self._claimed
        condition = self._crew.condition
        condition.release()
        start = time.perf_counter()
        blocked = self._blocked_elsewhere()
        try:
            claim = self._claim()
        except Interrupted:
            condition.acquire()
            self._claiming = False
            condition.notify_all()
            raise
        except BaseException as error:
            condition.acquire()
            self._fail(error)
            return False
        condition.acquire()
        self._claiming = False
        if claim is None:
            self._ended = True
            condition.notify_all()
            return False
        self._claimed += 1
        condition.notify_all()
        start += self._blocked_elsewhere() - blocked
        self._finish(number, claim, start)
        return True

    def _blocked_elsewhere(self) -> float:
        return 0.0 if self.upstream is None else self.upstream.blocked_s

    def _finish(self, number: int, claim: Claim, start: float) -> None:
        condition = self._crew.condition
        condition.release()
        outcome: tuple[bool, Any]
        try:
            outcome = True, self._work(claim)
        except BaseException as error:
            outcome = False, error
        spent = time.perf_counter() - start
        condition.acquire()
        self.busy_s += spent
        self._results[number] = outcome
        condition.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Deliver an error of a claim in its turn; nothing can be claimed after it."""
        self._results[self._claimed] = False, error
        self._claimed += 1
        self._claiming, self._ended = False, True
        self._crew.condition.notify_all()


AnyMap = InlineMap[Any, Any] | OrderedMap[Any, Any]
