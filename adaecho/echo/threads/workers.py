"""Background threads: ordered, bounded, parallel maps that can pause, and stop without losing what is done.

Reading, decoding and NumPy or torch kernels release the interpreter's lock; for Python that holds it these
threads ask processes (``threads.processes``).

They are crash-only. A signal handler's exception, e.g. KeyboardInterrupt, may come up in the main thread
between any two calls, in a library's locks too. So that thread takes no lock that a worker takes: it sets
flags, and speaks to them by queues written in C, of which each call happens or does not. After an interrupt
they are told to stop, and others begin anew at the consumer's place; nothing here is mended.
"""

import _thread
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Claim = TypeVar("Claim")
Result = TypeVar("Result")
Outcome = tuple[bool, Any]
"""Whether it came to its end, and the result or the error."""

_WAKE, _END = object(), object()
_LOOK_EVERY_S = 0.005  # at a flag, while a thread rests or is waited for


class Stopped(BaseException):  # a signal between threads that no handler of errors should catch
    """The threads are to stop; who waits for a result has changed nothing and can ask again later."""


class GivenUp(BaseException):
    """A piece of work was given up, since the threads are to stop: what depends on it has to begin anew."""


def sendable(error: Exception) -> Exception:
    """The error, or one that says the same where it can't be sent from a process to another."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        copied = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            copied.add_note(note)
        return copied


def apart(work: Callable[[], Any]) -> Any:
    """The result of work by another thread than this one, which an interrupt may come to."""
    outcomes: SimpleQueue[Outcome] = SimpleQueue()

    def worked() -> None:
        try:
            outcomes.put((True, work()))
        except BaseException as error:
            outcomes.put((False, error))

    _thread.start_new_thread(worked, ())
    good, result = outcomes.get()
    if not good:
        raise result
    return result


class Crew:
    """Threads that were started together, and are told together to stop."""

    stopping = False


class PoolThread(threading.Thread):
    """A thread of a pool.

    Attributes:
        working: rather than waiting for something; where a pause begins it is waited for.
        ended: nothing is left to do.
        elsewhere_s: of the piece of work in hand, what processes were busy with it beyond the wait for them.
    """

    def __init__(self, pool: "ThreadPool", crew: Crew, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._pool, self.crew = pool, crew
        self.working = self.ended = False
        self.elsewhere_s = 0.0

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.working = False
            self._pool.ends(self)

    def work(self) -> None:
        """Begin to work, once there is no pause; raises Stopped where there is a stop."""
        self.working = True
        while self._pool.paused_by is not None and not self.crew.stopping:
            self.working = False
            time.sleep(_LOOK_EVERY_S)
            self.working = True
        if self.crew.stopping:
            raise Stopped

    def rest(self, seconds: float) -> None:
        """Sleep, no longer than until the thread is to stop.

        Raises:
            GivenUp: it is to stop.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self.crew.stopping:
            time.sleep(min(left, _LOOK_EVERY_S))
        if self.crew.stopping:
            raise GivenUp


class ThreadPool:
    """What the threads of one run share: whether to work, pause or stop.

    Args:
        stopped: called after a stop, once no thread works any more; must not wait for anything.

    Attributes:
        maps: whose threads these are.
        closing: whether they are to end for good.
        paused_by: the thread that has asked for a pause.
    """

    def __init__(self, stopped: Callable[[], None]) -> None:
        self._stopped, self.closing = stopped, False
        self.paused_by: int | None = None
        self._crew: Crew | None = None
        self._threads: list[PoolThread] = []
        self._lock = threading.Lock()  # of the threads alone: of their beginning and end
        self._hiring: set[Crew] = set()  # for which threads are being started
        self.maps: list[OrderedMap[Any, Any]] = []
        self._process: int | None = None  # in which there may be threads

    # By the consumer

    @property
    def stopping(self) -> bool:
        """Whether there is no thread that would go on working."""
        return self._crew is None or self._crew.stopping

    def go(self) -> None:
        """Start threads, if there are none."""
        if not self.stopping:
            return
        crew, self._process = Crew(), os.getpid()
        self._crew = crew
        # By a thread, which no signal handler interrupts: started here, they could be left half started.
        _thread.start_new_thread(self._hire, (crew,))

    def stop(self) -> None:
        """Let every thread end once the work in its hands is done; what is finished is kept for later."""
        if self._stayed_behind:
            return
        crew = self._crew
        if crew is not None:
            crew.stopping = True
        for ordered in self.maps:
            ordered.wake()
        if self._crew is crew and self._ended():  # the consumer may have begun anew meanwhile
            self._stopped()

    def join(self, wait_s: float | None = None) -> bool:
        """Wait for the threads after ``stop``, so long at most; whether all have ended."""
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while not (self._stayed_behind or self._ended()):
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def _ended(self) -> bool:
        here = threading.current_thread()
        return not self._hiring and all(thread.ended or thread is here for thread in list(self._threads))

    def pause(self) -> None:
        """Return once no thread works; those that wait go on waiting until ``resume``."""
        try:
            if self.paused_by is None:
                self.paused_by = threading.get_ident()
            while any(thread.working for thread in list(self._threads)):
                time.sleep(_LOOK_EVERY_S)
        except BaseException:  # Ctrl-C: the caller may go on, and must not wait for a resume
            self.resume()
            raise

    def resume(self) -> None:
        """End a pause."""
        self.paused_by = None

    def resume_for_caller(self) -> None:
        """End a pause if the thread that made it asks for a batch: it would wait for ever.

        So an interrupt that falls into the end of a pause leaves nobody paused.
        """
        if self.paused_by == threading.get_ident():
            self.resume()

    @property
    def started_here(self) -> bool:
        """Whether this process has started threads."""
        return self._process == os.getpid()

    @property
    def _stayed_behind(self) -> bool:
        """Whether this process was forked from the one with the threads, which may have held any lock."""
        return self._process is not None and not self.started_here

    def check_process(self) -> None:
        """Raises RuntimeError in a process that was forked from the one with the threads."""
        if self._stayed_behind:
            raise RuntimeError(
                f"this EchoLoader began to iterate in process {self._process}, from which this one was "
                "forked, and its threads stayed there; make a loader in this process, or start it before the "
                "first batch or by the start method 'spawn'"
            )

    # By its threads

    def _hire(self, crew: Crew) -> None:
        self._hiring.add(crew)  # before a look at its flag: who has raised that looks here afterwards
        with self._lock:
            self._threads = [thread for thread in self._threads if not thread.ended]
            try:
                for ordered in self.maps:
                    if not crew.stopping:
                        self._hire_for(ordered, crew)
            finally:
                self._hiring.discard(crew)
                self._let_go()

    def _hire_for(self, ordered: "OrderedMap[Any, Any]", crew: Crew) -> None:
        for number in range(ordered.wanted):
            thread = PoolThread(self, crew, ordered.serve, f"adaecho-{ordered.name}")
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as error:  # no more can be had: those there are do the same work
                thread.ended = True
                if not number:
                    ordered.end(False, RuntimeError(
                        f"{error}: too little memory for one more, or too low a limit of them; lower "
                        "num_workers"
                    ))  # fmt: skip
                return

    def ends(self, thread: PoolThread) -> None:
        """A thread is at its end; the last one after a stop lets go of the source."""
        with self._lock:
            self._let_go(thread)
            thread.ended = True

    def _let_go(self, last: PoolThread | None = None) -> None:
        others = (other for other in self._threads if other is not last)
        if self.stopping and not self._hiring and all(other.ended for other in others):
            self._stopped()


def _taken(queue: SimpleQueue[Any], waiting: Crew | ThreadPool) -> Any:
    """The next of a queue; raises Stopped where there is a stop, before it waits or while it does."""
    while not waiting.stopping:
        if (taken := queue.get()) is not _WAKE:
            return taken
    raise Stopped


class InlineMap(Generic[Claim, Result]):
    """``work(claim())``, in the thread that asks.

    Args:
        claim: the next piece of work, or None when there is no more; called by one thread at a time.
        work: what to do with it; called in parallel.

    Attributes:
        wanted: threads.
        at_once: pieces that can be worked on at once.
        claim_s, work_s: in which it was busy.
        blocked_s: of those who waited here.
        upstream: whom claims wait for: that time is not busy.
    """

    wanted = at_once = 1
    claim_s = work_s = blocked_s = 0.0
    upstream: "InlineMap[Any, Any] | None" = None

    def __init__(self, claim: Callable[[], Claim | None], work: Callable[[Claim], Result]) -> None:
        self._claim, self._work = claim, work

    def get(self) -> Result | None:
        """The next result; None after the last."""
        start = time.perf_counter()
        claim = self._claimed_next()
        if claim is None:
            return None
        claimed = time.perf_counter()
        result = self._work(claim)
        done = time.perf_counter()
        self.work_s += done - claimed
        self.blocked_s += done - start
        return result

    def _claimed_next(self) -> Claim | None:
        start, before = time.perf_counter(), 0.0 if self.upstream is None else self.upstream.blocked_s
        claim = self._claim()
        waited = 0.0 if self.upstream is None else self.upstream.blocked_s - before
        self.claim_s += time.perf_counter() - start - waited
        return claim


class OrderedMap(InlineMap[Claim, Result]):
    """``work(claim())`` in several threads, delivered in the order of the claims.

    Args:
        pool: what the threads belong to.
        claim, work: as of ``InlineMap``.
        threads: how many.
        at_once: pieces that can be worked on at once; by default as many.
        window: pieces claimed and not yet delivered, at most.
        name: of the threads.
    """

    def __init__(
        self,
        pool: ThreadPool,
        claim: Callable[[], Claim | None],
        work: Callable[[Claim], Result],
        *,
        threads: int,
        window: int,
        name: str,
        at_once: int = 0,
    ) -> None:
        super().__init__(claim, work)
        self._pool, self.wanted, self.name = pool, threads, name
        self.at_once = at_once or threads
        self._turn = threading.Lock()  # held by the thread that claims
        self._claimed, self._ended = 0, False
        self._order = threading.Lock()  # held by the thread that puts results in order
        self._results: dict[int, Outcome] = {}  # that others are still to come before
        self._following = 0
        self._ready: SimpleQueue[Any] = SimpleQueue()  # outcomes in order
        self._room: SimpleQueue[Any] = SimpleQueue()  # one for each piece that may be claimed
        for _ in range(max(window, 1)):
            self._room.put(None)
        pool.maps.append(self)

    # By the consumer

    def wake(self) -> None:
        """Let those who wait see that there is a stop."""
        self._ready.put(_WAKE)
        self._room.put(_WAKE)

    def widen(self, pieces: int) -> None:
        """Let so many more be claimed ahead."""
        for _ in range(pieces):
            self._room.put(None)

    def get(self) -> Result | None:
        """The next result; None after the last. Raises what claim or work raised for it.

        A thread of the same pool pauses and stops with it while it waits; what is ready stays so.
        """
        start, thread = time.perf_counter(), threading.current_thread()
        if isinstance(thread, PoolThread):
            thread.working = False
            good, result = _taken(self._ready, thread.crew)
            with suppress(Stopped):  # then this is the last
                thread.work()
        else:
            good, result = _taken(self._ready, self._pool)
        self.blocked_s += time.perf_counter() - start
        if result is _END:
            self._ready.put((True, _END))
            return None
        self._room.put(None)
        if not good:
            raise result
        return result  # type: ignore[no-any-return]

    # By its threads

    def serve(self) -> None:
        """Pieces of work, until the last one or a stop."""
        thread = threading.current_thread()
        assert isinstance(thread, PoolThread)
        with suppress(Stopped):
            while (piece := self._piece(thread)) is not None:
                number, claim = piece
                start, thread.elsewhere_s = time.perf_counter(), 0.0
                outcome: Outcome
                try:
                    outcome = True, self._work(claim)
                except BaseException as error:
                    outcome = False, error
                self._deliver(number, outcome, time.perf_counter() - start + thread.elsewhere_s)
                thread.working = False

    def _piece(self, thread: PoolThread) -> tuple[int, Claim] | None:
        """The next claim and its number; None when there is no more."""
        with self._turn:
            if self._ended:
                return None
            _taken(self._room, thread.crew)
            try:
                thread.work()
                claim = self._claimed_next()
            except Stopped:
                self._room.put(None)
                raise
            except BaseException as error:
                self.end(False, error)
                return None
            if claim is None:
                self.end(True, _END)
                return None
            self._claimed += 1
            return self._claimed - 1, claim

    def _deliver(self, number: int, outcome: Outcome, spent_s: float = 0.0) -> None:
        with self._order:
            self.work_s += spent_s
            self._results[number] = outcome
            while self._following in self._results:
                self._ready.put(self._results.pop(self._following))
                self._following += 1

    def end(self, good: bool, result: Any) -> None:
        """Deliver the end, or an error, in its turn; nothing can be claimed after it."""
        self._ended = True
        self._deliver(self._claimed, (good, result))
