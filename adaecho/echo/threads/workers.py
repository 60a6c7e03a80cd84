"""Background threads: ordered, bounded, parallel maps that can pause, stop and go on without losing anything.

Threads, not processes: reading, decoding and NumPy or torch kernels release the interpreter's lock.

A signal handler's exception, e.g. KeyboardInterrupt, may come up in the main thread between any two calls.
What that thread does here must bear it: it takes the lock by ``with`` alone, waits for nothing while it holds
it, and neither starts nor joins a thread of Python's ``threading`` (an interrupted ``Thread.join`` takes a
running thread for an ended one, bpo-45274).
"""

import _thread
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

Claim = TypeVar("Claim")
Result = TypeVar("Result")


class Interrupted(BaseException):  # a signal between threads that no handler of errors should catch
    """The pool is stopping; who waits for a result gives up, has changed nothing and can ask again later."""


class GivenUp(BaseException):
    """A piece of work was given up because the pool is stopping: it has to be done once more."""


class Helper(Protocol):
    """Something that belongs to one thread."""

    def __call__(self, *arguments: Any) -> Any:
        """Ask it."""

    def close(self) -> None:
        """End it."""


class Condition(threading.Condition):
    """A condition on which the main thread can wait too, whatever a signal handler raises there."""

    def __init__(self, lock: threading.RLock) -> None:
        super().__init__(lock)
        self._own_lock = lock
        self._bells: list[threading.Lock] = []  # of those who wait from outside; each is held until it rings

    def wait_from_outside(self, ready: Callable[[], bool], deadline: float | None = None) -> bool:
        """Wait, the lock not held, until a time of the monotonic clock at most; whether it is ready."""
        while True:
            with self._own_lock:
                if ready():
                    return True
                bell = threading.Lock()
                bell.acquire()
                self._bells.append(bell)
            if not bell.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
                return False

    def notify_all(self) -> None:
        super().notify_all()
        for bell in self._bells:
            with suppress(RuntimeError):  # rung, where an interrupt or the garbage collector came in here
                bell.release()
        self._bells.clear()


class PoolThread(threading.Thread):
    """A thread of a pool; its ``helpers`` are closed when it ends.

    It is ``leaving``, under the pool's lock, from when it will do no more work: still alive, but another
    must be hired in its place. It has ``ended`` once nothing is left to do.
    """

    def __init__(self, thread_pool: "ThreadPool", target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.thread_pool = thread_pool
        self.helpers: dict[Any, Helper] = {}  # of the dataset and of each augmentation, by whose they are
        self.leaving = self.ended = False

    def run(self) -> None:
        try:
            super().run()
            for helper in self.helpers.values():
                helper.close()
        finally:
            self.thread_pool.left(self)

    def rest(self, seconds: float) -> None:
        """Sleep, no longer than until the pool is to stop.

        Raises:
            GivenUp: it is to stop.
        """
        condition = self.thread_pool.condition
        with self.thread_pool.lock:
            if condition.wait_for(lambda: self.thread_pool.stopping, seconds):
                raise GivenUp


class ThreadPool:
    """What the threads of one loader share: one lock, and whether to work, pause or stop.

    Each map has a condition of its own on that lock: waking threads that have nothing to do would take the
    interpreter's lock from the training step.

    Args:
        stopped: called after a stop, once no thread works any more; must not wait for anything.

    Attributes:
        lock: of all its maps.
        condition: to wait on for a pause or a stop.
    """

    def __init__(self, stopped: Callable[[], None]) -> None:
        self._stopped = stopped
        self.lock = threading.RLock()
        self.condition = Condition(self.lock)
        self.stopping = False
        self.paused = False
        self._paused_by: int | None = None
        self._active = 0
        self._staffed = False  # no thread is missing
        self._maps: list[OrderedMap[Any, Any]] = []
        self._process: int | None = None  # in which there may be threads

    def add(self, ordered: "OrderedMap[Any, Any]") -> Condition:
        """Take a map's threads into the pool; the condition on which they wait for each other."""
        self._maps.append(ordered)
        return Condition(self.lock)

    def staff(self, ordered: "OrderedMap[Any, Any]", threads: int) -> None:
        """Have another number of threads for a map from the next ``go`` on."""
        if self._stayed_behind:
            return
        with self.lock:
            ordered.wanted, self._staffed = threads, False

    def go(self) -> None:
        """Start the threads that are missing."""
        if self._staffed:  # asked for each batch: most need no lock
            return
        with self.lock:
            self.stopping, self._process = False, os.getpid()
        # By a thread, which no signal handler interrupts: started here, they could be left half started.
        _thread.start_new_thread(self._hire, ())

    def _hire(self) -> None:
        with self.lock:
            if self.stopping or self._staffed:
                return
            self._staffed = True
            for ordered in self._maps:
                ordered.hire()

    def stop(self) -> None:
        """Let every thread end once the work in its hands is done; what is finished is kept for later."""
        if self._stayed_behind:
            return
        with self.lock:
            self.stopping, self._staffed = True, False
            self._wake_all()
            self._tell_if_stopped()

    def join(self, wait_s: float | None = None) -> bool:
        """Wait for the threads after ``stop``, so long at most; whether all have ended."""
        if self._stayed_behind:
            return True
        deadline = None if wait_s is None else time.monotonic() + wait_s
        ended = self.condition.wait_from_outside(self._others_have_ended, deadline)
        if ended:
            self._process = None
        return ended

    def _others_have_ended(self) -> bool:
        threads = [thread for ordered in self._maps for thread in ordered.threads]
        return all(thread.ended or thread is threading.current_thread() for thread in threads)

    @property
    def _stayed_behind(self) -> bool:
        """Whether this process was forked from the one with the threads, which may have held any lock."""
        return self._process is not None and self._process != os.getpid()

    @property
    def may_have_threads(self) -> bool:
        """Whether some have been started, and not been waited for."""
        return self._process is not None

    def check_process(self) -> None:
        """Raises RuntimeError in a process that was forked from the one with the threads."""
        if self._stayed_behind:
            raise RuntimeError(
                f"this EchoLoader began to iterate in process {self._process}, from which this one was "
                "forked, and its threads stayed there; make a loader in this process, or start it before the "
                "first batch or by the start method 'spawn'"
            )

    def pause(self) -> None:
        """Return once no thread works; those that wait go on waiting until ``resume``."""
        with self.lock:
            if not self.paused:
                self.paused, self._paused_by = True, threading.get_ident()
        try:
            self.condition.wait_from_outside(lambda: self._active == 0)
        except BaseException:  # Ctrl-C: the caller may go on, and must not wait for a resume
            self.resume()
            raise

    def resume(self) -> None:
        """End a pause."""
        with self.lock:
            self.paused = False
            self._wake_all()
            self._paused_by = None  # last: where an interrupt came before, a resume is still to be made

    def resume_for_caller(self) -> None:
        """End a pause if the thread that made it asks for a batch: it would wait for ever.

        So an interrupt that falls into the end of a pause leaves nobody paused.
        """
        if self._paused_by == threading.get_ident():
            self.resume()

    def _wake_all(self) -> None:
        self.condition.notify_all()
        for ordered in self._maps:
            ordered.changed.notify_all()

    def wait_until(self, changed: Condition, ready: Callable[[], bool]) -> None:
        """Wait as one of its threads that is at work (the lock held); raises Interrupted on stopping."""
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

    def quit(self, thread: "PoolThread") -> None:
        """This thread will do no more work: another may have to be hired in its place (the lock held)."""
        thread.leaving, self._staffed = True, False
        self._leave()
        self._tell_if_stopped()

    def left(self, thread: "PoolThread") -> None:
        """This thread ends now."""
        with self.lock:
            thread.ended = True
            self.condition.notify_all()

    def _tell_if_stopped(self) -> None:
        if self.stopping and not any(ordered.at_work for ordered in self._maps):
            self._stopped()

    def _leave(self) -> None:
        self._active -= 1
        if not self._active:
            self.condition.notify_all()


class InlineMap(Generic[Claim, Result]):
    """``work(claim())`` in the thread that asks."""

    wanted = 1  # threads

    def __init__(self, claim: Callable[[], Claim | None], work: Callable[[Claim], Result]) -> None:
        self._claim, self._work = claim, work
        self.claim_s = self.work_s = 0.0
        self.blocked_s = 0.0
        self.upstream: AnyMap | None = None

    def reset(self) -> None:
        """Nothing is kept here."""

    def forget_errors(self) -> None:
        """Nor errors."""

    def get(self) -> Result | None:
        """The next result; None after the last."""
        start = time.perf_counter()
        elsewhere = 0.0 if self.upstream is None else self.upstream.blocked_s
        claim = self._claim()
        if claim is None:
            return None
        claimed = time.perf_counter()
        result = self._work(claim)
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
        thread_pool: what the threads belong to.
        claim: the next piece of work, or None when there is no more; called by one thread at a time.
        work: what to do with it; called in parallel.
        threads: how many.
        window: pieces claimed and not yet delivered, at most.
    """

    def __init__(
        self,
        thread_pool: ThreadPool,
        claim: Callable[[], Claim | None],
        work: Callable[[Claim], Result],
        *,
        threads: int,
        window: int,
        name: str,
    ) -> None:
        self._thread_pool, self._claim, self._work = thread_pool, claim, work
        self.wanted, self._window, self._name = threads, max(window, 1), name
        self.threads: list[PoolThread] = []  # started, and perhaps ended
        self._claiming = False
        self._claimed = 0
        self._delivered = 0
        self._ended = False
        self._results: dict[int, tuple[bool, Any]] = {}
        self.claim_s = self.work_s = 0.0  # in which threads were busy
        self.blocked_s = 0.0  # of those who waited here
        # Whom claims wait for: that time is not busy.
        self.upstream: AnyMap | None = None
        self.changed = thread_pool.add(self)

    def reset(self) -> None:
        """Forget everything claimed, after the threads have ended."""
        self._claimed = self._delivered = 0
        self._ended = self._claiming = False
        self._results.clear()

    def forget_errors(self) -> None:
        """Keep none, once stopped: their tracebacks hold the frames of whoever asked, and so its loader."""
        with self._thread_pool.lock:
            self._results = {number: result for number, result in self._results.items() if result[0]}

    def hire(self) -> None:
        """Start missing threads (the lock held, in a thread that no signal handler interrupts)."""
        self.threads = [thread for thread in self.threads if not thread.ended]
        missing = 0 if self._ended else self.wanted - self.at_work
        try:
            for _ in range(missing):
                thread = PoolThread(self._thread_pool, self._run, f"adaecho-{self._name}")
                thread.start()
                self.threads.append(thread)
        except RuntimeError as error:  # no more threads can be had: those there are do the same work
            if not self.at_work:
                reason = (
                    f"{error}: too little memory for one more, or too low a limit of them; lower num_workers"
                )
                self._fail(RuntimeError(reason))

    @property
    def at_work(self) -> int:
        """Threads that work or wait for work (the lock held)."""
        return sum(not thread.leaving for thread in self.threads)

    def get(self) -> Result | None:
        """The next result; None after the last. Raises what claim or work raised for it.

        A thread of the same pool pauses and stops with it while it waits.
        """
        thread_pool, thread = self._thread_pool, threading.current_thread()
        own = isinstance(thread, PoolThread) and thread.thread_pool is thread_pool
        start = time.perf_counter()
        if not own:
            self.changed.wait_from_outside(lambda: self._is_ready() or thread_pool.stopping)
        with thread_pool.lock:
            if own:
                thread_pool.wait_until(self.changed, self._is_ready)
            elif not self._is_ready():
                raise Interrupted
            self.blocked_s += time.perf_counter() - start
            if self._delivered not in self._results:
                return None
            good, result = self._results[self._delivered]
            if not good:
                raise result  # and again at the next call
            del self._results[self._delivered]
            self._delivered += 1
            self.changed.notify_all()
            return result  # type: ignore[no-any-return]

    def _is_ready(self) -> bool:
        return self._delivered in self._results or (self._ended and self._delivered == self._claimed)

    def _may_claim(self) -> bool:
        if self._ended:
            return True
        return not self._claiming and self._claimed - self._delivered < self._window

    def _run(self) -> None:
        changed = self.changed
        try:
            with changed:
                thread = threading.current_thread()
                assert isinstance(thread, PoolThread)
                self._thread_pool.enter()
                try:
                    while self._step():
                        pass
                except Interrupted:
                    pass
                finally:
                    self._thread_pool.quit(thread)
        except BaseException as error:  # the interpreter is going down, or a bug here: never a silent hang
            with changed:
                self._fail(error)
            raise

    def _step(self) -> bool:
        """Claim and do one piece (the lock held on entry and exit); False when there is no more."""
        self._thread_pool.wait_until(self.changed, self._may_claim)
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
