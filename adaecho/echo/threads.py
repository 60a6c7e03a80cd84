"""Background threads that process pieces of work in parallel and return the results in order.

Threads suit reading, decoding and NumPy or torch kernels, which release the GIL. Code that holds the GIL runs
in processes instead (``batch.process_workers``).
"""

import _thread
import logging
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
"""Whether a piece of work succeeded, and its result or its error."""

_LOG = logging.getLogger("adaecho")
_WAKE, _END = object(), object()
_LOOK_EVERY_S = 0.005  # interval between checks of a flag


class Shutdown(BaseException):  # not an Exception, so that error handlers do not catch it
    """Raised in a thread that waits for work or a result when the pool stops."""


# Ctrl-C can raise KeyboardInterrupt in the main thread between any two calls. The main thread therefore never
# acquires a lock that a worker uses: it only sets flags and uses SimpleQueue, whose calls are atomic.
class PoolThread(threading.Thread):
    """A background thread that its ``ThreadPool`` can pause and stop."""

    def __init__(self, pool: "ThreadPool", serve: Callable[["PoolThread"], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._pool, self._serve = pool, serve
        self.working = self.ended = False  # a pause waits until no thread is working
        # Seconds to add to the thread's elapsed time if it waits for a worker process: the process's working
        # time minus the waiting time.
        self.elsewhere_s = 0.0

    def start(self) -> None:
        """Start the thread."""
        # An interrupt in Thread.start could break one of Python's locks, so a helper thread, which no
        # interrupt reaches, calls it.
        _thread.start_new_thread(super().start, ())

    def run(self) -> None:
        self._pool.threads.append(self)
        try:
            with suppress(Shutdown):
                self._serve(self)
        finally:
            self.working, self.ended = False, True

    def begin_work(self) -> None:
        """Wait for the end of any pause and mark this thread as working; raise Shutdown after a stop."""
        self.working = True
        while self._pool.paused_by is not None and not self._pool.stopping:
            self.working = False
            time.sleep(_LOOK_EVERY_S)
            self.working = True
        if self._pool.stopping:
            raise Shutdown


class ThreadPool:
    """A group of background threads that pause and stop together."""

    def __init__(self) -> None:
        self.maps: list[OrderedMap[Any, Any]] = []  # the stages of work, each with its own threads
        self.threads: list[PoolThread] = []
        self.stopping = False  # whether the threads must end
        self.paused_by: int | None = None  # id of the thread that requested a pause; None if not paused
        self._process: int | None = None  # id of the process that started the threads

    def start(self, ordered: "OrderedMap[Any, Any]") -> None:
        """Start the threads that do the work of an ``OrderedMap``."""
        self._process = os.getpid()
        for _ in range(ordered.wanted):
            PoolThread(self, ordered.serve, f"adaecho-{ordered.name}").start()

    def run_in_thread(self, work: Callable[[], Result], *, after_stop: bool = False) -> Result:
        """Return the result of ``work()``, called in a new thread so that Ctrl-C cannot interrupt it."""
        # With ``after_stop``, the call also works after the thread pool has stopped.
        outcomes: SimpleQueue[Outcome] = SimpleQueue()

        def worked(thread: PoolThread) -> None:
            try:
                if not after_stop:
                    thread.begin_work()
                outcomes.put((True, work()))
            except BaseException as error:
                outcomes.put((False, error))

        self._process = os.getpid()
        try:
            PoolThread(self, worked, "adaecho-work").start()
        except RuntimeError:  # no thread can be started while the interpreter exits
            return work()
        good, result = outcomes.get()
        if not good:
            raise result
        return result  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Make each thread end after its current piece of work."""
        self.stopping = True
        for ordered in self.maps:
            ordered.wake()

    def join(self, wait_s: float | None = None) -> bool:
        """Wait up to ``wait_s`` seconds for all other threads to end, and return whether they have."""
        deadline, here = None if wait_s is None else time.monotonic() + wait_s, threading.current_thread()
        while self.started_here and not all(one.ended or one is here for one in list(self.threads)):
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def pause(self) -> None:
        """Keep threads from beginning work until ``resume``, and wait until no thread is working."""
        try:
            if self.paused_by is None:
                self.paused_by = threading.get_ident()
            while any(thread.working for thread in list(self.threads)):
                time.sleep(_LOOK_EVERY_S)
        except BaseException:  # after Ctrl-C the caller may never call resume
            self.resume()
            raise

    def resume(self) -> None:
        """End a pause."""
        self.paused_by = None

    def resume_for_caller(self) -> None:
        """End a pause if the calling thread started it."""
        # Without this, the thread would wait forever if an interrupt kept it from ending its pause.
        if self.paused_by == threading.get_ident():
            self.resume()

    @property
    def started_here(self) -> bool:
        """Whether this process started the threads; False in a forked child."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        """Raise RuntimeError if this process was forked from the process that runs the threads."""
        if self._process is not None and not self.started_here:
            raise RuntimeError(
                "this process was forked after this EchoLoader began to iterate, and the loader's threads do "
                "not exist here; create a loader in each process"
            )


class InlineMap(Generic[Claim, Result]):
    """Processes one piece of work in each call to ``get``, in the calling thread."""

    wanted = at_once = 1  # number of threads, and number of pieces processed in parallel
    # Seconds spent in ``claim`` and in ``work`` by all threads, and seconds that callers of ``get`` waited.
    claim_s = work_s = blocked_s = 0.0
    # The stage before this one, from which ``claim`` takes its input. ``claim_s`` excludes waiting for it.
    upstream: "InlineMap[Any, Any] | None" = None

    def __init__(self, claim: Callable[[], Claim | None], work: Callable[[Claim], Result]) -> None:
        # ``claim`` returns the next piece of work, or None after the last one. ``work`` processes it.
        self._claim, self._work = claim, work

    def get(self) -> Result | None:
        """Return the next result, or None after the last one."""
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
    """Processes pieces of work in several threads and returns the results in order."""

    def __init__(
        self,
        pool: ThreadPool,
        claim: Callable[[], Claim | None],  # only one thread at a time calls it
        work: Callable[[Claim], Result],  # several threads call it in parallel
        *,
        threads: int,
        window: int,  # maximum number of pieces that may be started before ``get`` has returned their results
        name: str,
        # Number of pieces processed in parallel; 0 means ``threads``. It is smaller than ``threads`` if two
        # threads send their pieces to one worker process, which processes only one piece at a time.
        at_once: int = 0,
    ) -> None:
        super().__init__(claim, work)
        self._pool, self.wanted, self.name = pool, threads, name
        self.at_once = at_once or threads
        self._turn, self._ended = threading.Lock(), False  # the lock is held by the claiming thread
        self._pieces: SimpleQueue[Any] = SimpleQueue()  # a queue for the outcome of each claim, in order
        self._room: SimpleQueue[Any] = SimpleQueue()  # one entry for each piece that may be claimed
        for _ in range(max(window, 1)):
            self._room.put(None)
        pool.maps.append(self)

    def wake(self) -> None:
        """Wake the waiting threads, so that they notice a stop."""
        self._pieces.put(_WAKE)
        self._room.put(_WAKE)

    def get(self) -> Result | None:
        """Return the next result, or None after the last one. Raise any error of ``claim`` or ``work``."""
        start, thread = time.perf_counter(), threading.current_thread()
        if isinstance(thread, PoolThread):
            thread.working = False
        # While it waits, a thread does not count as working, so a pause does not wait for it.
        piece = self._taken(self._pieces)
        good, result = piece.get()
        if isinstance(thread, PoolThread):
            thread.begin_work()
        self.blocked_s += time.perf_counter() - start
        if result is _END:
            self._put_end(True, _END)  # so that further calls return None too
            return None
        self._room.put(None)
        if not good:
            raise result
        return result  # type: ignore[no-any-return]

    def _taken(self, queue: SimpleQueue[Any]) -> Any:
        while not self._pool.stopping:
            if (taken := queue.get()) is not _WAKE:
                return taken
        raise Shutdown

    def _put_end(self, good: bool, result: Any) -> None:
        piece: SimpleQueue[Outcome] = SimpleQueue()
        piece.put((good, result))
        self._pieces.put(piece)

    def serve(self, thread: PoolThread) -> None:
        """Process pieces of work until there are no more or the pool stops."""
        spent_s: float | None = 0.0
        while spent_s is not None:
            spent_s = self._serve_one(thread, spent_s)

    def _serve_one(self, thread: PoolThread, spent_s: float) -> float | None:
        """Process the next piece of work; return the seconds spent, or None if there is no more work."""
        piece: SimpleQueue[Outcome] = SimpleQueue()
        with self._turn:
            self.work_s += spent_s
            if self._ended or (claim := self._claimed_by(thread)) is None:
                return None
            self._pieces.put(piece)
        start, thread.elsewhere_s = time.perf_counter(), 0.0
        try:
            piece.put((True, self._work(claim)))
        except BaseException as error:
            piece.put((False, error))
        thread.working = False
        return time.perf_counter() - start + thread.elsewhere_s

    def _claimed_by(self, thread: PoolThread) -> Claim | None:
        self._taken(self._room)
        try:
            thread.begin_work()
            claim = self._claimed_next()
        except Shutdown:
            raise
        except BaseException as error:
            self._ended = True
            self._put_end(False, error)
            return None
        if claim is None:
            self._ended = True
            self._put_end(True, _END)
        return claim


WAITS: dict[int, tuple[float, Callable[[], str]]] = {}
"""For each thread that waits for a batch: the start of the wait, and a function that names its reason."""
_watching: dict[int, bool] = {}  # whether the logging thread runs, by process
_TELL_AFTER_S = 10.0


def tell_long_waits() -> None:
    """Start a thread that logs why a batch is late, after 10 s, 20 s, 40 s and so on."""
    if not _watching.setdefault(os.getpid(), False):
        _watching[os.getpid()] = True
        _thread.start_new_thread(_watch, ())


def _watch() -> None:
    next_after_s: dict[float, float] = {}  # seconds after which each wait gets its next line
    while True:
        time.sleep(_TELL_AFTER_S / 20)
        # No variable may keep a ``reason``, because it would keep a loader that is no longer used.
        next_after_s = {wait[0]: _tell(next_after_s, *wait) for wait in [*WAITS.values()]}


def _tell(next_after_s: dict[float, float], since: float, reason: Callable[[], str]) -> float:
    """Log a wait if it has lasted long enough, and return after how many seconds to log it again."""
    after_s = next_after_s.get(since, _TELL_AFTER_S)
    if (waited_s := time.monotonic() - since) < after_s:
        return after_s
    _LOG.warning("waiting for a batch for %.0f s: %s", waited_s, reason())
    return 2 * after_s


def picklable_error(error: Exception) -> Exception:
    """Return a copy of ``error``, or a RuntimeError with the same text if pickle cannot copy it."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        copied = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            copied.add_note(note)
        return copied
