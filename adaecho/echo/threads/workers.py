"""Background threads: ordered, bounded, parallel maps that can pause, stop and go on without losing anything.

Threads, not processes: reading, decoding and NumPy or torch kernels release the interpreter's lock.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from adaecho.echo.threads.crew import Crew, CrewThread, Interrupted

Claim = TypeVar("Claim")
Result = TypeVar("Result")


class InlineMap(Generic[Claim, Result]):
    """``work(claim())`` in the thread that asks.

    What was claimed is kept until its work has ended: when that is interrupted (Ctrl-C, or a thread told to
    stop), whoever asks next gets it.
    """

    wanted = 1  # threads

    def __init__(self, claim: Callable[[], Claim | None], work: Callable[[Claim], Result]) -> None:
        self._claim, self._work = claim, work
        self._claimed: Claim | None = None
        self.claim_s = self.work_s = 0.0
        self.blocked_s = 0.0
        self.upstream: AnyMap | None = None

    def reset(self) -> None:
        """Forget what was claimed."""
        self._claimed = None

    def get(self, *, by_crew: bool) -> Result | None:  # noqa: ARG002 (as OrderedMap)
        """The next result; None after the last."""
        start = time.perf_counter()
        elsewhere = 0.0 if self.upstream is None else self.upstream.blocked_s
        if self._claimed is None:
            self._claimed = self._claim()
            if self._claimed is None:
                return None
        claimed = time.perf_counter()
        try:
            result = self._work(self._claimed)
        except Exception:
            self._claimed = None
            raise
        self._claimed = None
        done = time.perf_counter()
        if self.upstream is not None:
            self.claim_s -= self.upstream.blocked_s - elsewhere
        self.claim_s += claimed - start
        self.work_s += done - claimed
        self.blocked_s += done - start
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
        self.wanted, self._window, self._name = threads, max(window, 1), name
        self._threads: list[CrewThread] = []
        self._claiming = False
        self._claimed = 0
        self._delivered = 0
        self._ended = False
        self._results: dict[int, tuple[bool, Any]] = {}
        self._unfinished: list[tuple[int, Claim]] = []  # whose work was interrupted: to be done again
        self.claim_s = self.work_s = 0.0  # in which threads were busy
        self.blocked_s = 0.0  # of those who waited here
        # Whom claims wait for: that time is not busy.
        self.upstream: AnyMap | None = None
        self.changed = crew.add(self)

    def reset(self) -> None:
        """Forget everything claimed, after the threads have ended."""
        self._claimed = self._delivered = 0
        self._ended = self._claiming = False
        self._results.clear()
        self._unfinished.clear()

    def hire(self) -> None:
        """Start missing threads (the lock held)."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        done = self._ended and not self._unfinished
        missing = 0 if done else self.wanted - self.at_work
        for _ in range(missing):
            thread = CrewThread(self._crew, self._run, f"adaecho-{self._name}")
            self._threads.append(thread)
            thread.start()

    @property
    def at_work(self) -> int:
        """Threads that work or wait for work (the lock held)."""
        return sum(not thread.leaving for thread in self._threads)

    def join(self) -> None:
        """Wait for the threads to end."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def get(self, *, by_crew: bool) -> Result | None:
        """The next result; None after the last. Raises what claim or work raised for it.

        Args:
            by_crew: the caller is a thread of the same crew, which pauses and stops with it.
        """
        crew = self._crew
        with self.changed:
            start = time.perf_counter()
            if by_crew:
                crew.wait_until(self.changed, self._is_ready)
            else:
                self.changed.wait_for(lambda: self._is_ready() or crew.stopping)
                if not self._is_ready():
                    raise Interrupted
            self.blocked_s += time.perf_counter() - start
            if self._delivered not in self._results:
                return None
            good, result = self._results[self._delivered]
            if not good:
                raise result  # and again for whoever asks again
            del self._results[self._delivered]
            self._delivered += 1
            self.changed.notify_all()
            return result  # type: ignore[no-any-return]

    def _is_ready(self) -> bool:
        return self._delivered in self._results or (self._ended and self._delivered == self._claimed)

    def _may_claim(self) -> bool:
        if self._unfinished or self._ended:
            return True
        return not self._claiming and self._claimed - self._delivered < self._window

    def _run(self) -> None:
        changed = self.changed
        try:
            with changed:
                self._crew.enter()
                try:
                    while self._step():
                        pass
                except Interrupted:
                    pass
                finally:
                    thread = threading.current_thread()
                    assert isinstance(thread, CrewThread)
                    self._crew.quit(thread)
        except BaseException as error:  # the interpreter is going down, or a bug here: never a silent hang
            with changed:
                self._fail(error)
            raise

    def _step(self) -> bool:
        """Claim and do one piece (the lock held on entry and exit); False when there is no more."""
        self._crew.wait_until(self.changed, self._may_claim)
        if self._unfinished:
            self._finish(*self._unfinished.pop(0))
            return True
        if self._ended:
            return False
        self._claiming = True
        number = self._claimed
        changed = self.changed
        changed.release()
        start = time.perf_counter()
        elsewhere = self._blocked_elsewhere()
        try:
            claim = self._claim()
        except Interrupted:
            changed.acquire()
            self._claiming = False
            changed.notify_all()
            raise
        except BaseException as error:
            changed.acquire()
            self._fail(error)
            return False
        spent = time.perf_counter() - start - (self._blocked_elsewhere() - elsewhere)
        changed.acquire()
        self._claiming = False
        if claim is None:
            self._ended = True
            changed.notify_all()
            return False
        self._claimed += 1
        self.claim_s += spent
        changed.notify_all()
        self._finish(number, claim)
        return True

    def _blocked_elsewhere(self) -> float:
        return 0.0 if self.upstream is None else self.upstream.blocked_s

    def _finish(self, number: int, claim: Claim) -> None:
        changed = self.changed
        changed.release()
        start = time.perf_counter()
        outcome: tuple[bool, Any]
        try:
            outcome = True, self._work(claim)
        except Interrupted:
            changed.acquire()
            self._unfinished.append((number, claim))
            raise
        except BaseException as error:
            outcome = False, error
        spent = time.perf_counter() - start
        changed.acquire()
        self.work_s += spent
        self._results[number] = outcome
        changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Deliver an error of a claim in its turn; nothing can be claimed after it."""
        self._results[self._claimed] = False, error
        self._claimed += 1
        self._claiming, self._ended = False, True
        self.changed.notify_all()


AnyMap = InlineMap[Any, Any] | OrderedMap[Any, Any]
