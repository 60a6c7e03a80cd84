"""Background threads: ordered, bounded, parallel maps that can pause and stop.

Threads suit reading, decoding and kernels of NumPy or torch, which release the GIL. Code that holds the GIL
runs in processes (``batch.process_workers``), and these threads wait for the answers.

An interrupt may raise KeyboardInterrupt in the main thread between any two calls. So the main thread takes no
lock that a worker takes. It sets flags and uses ``SimpleQueue``, whose calls are atomic. After an interrupt
all threads stop, and new ones begin at the cursor.
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
"""Whether the work succeeded, and its result or error."""

_LOG = logging.getLogger("adaecho")
_WAKE, _END = object(), object()
_LOOK_EVERY_S = 0.005  # interval between checks of a flag


class Shutdown(BaseException):  # a signal between threads that no handler of errors should catch
    """The threads stop, so the requested result will not come."""


class PoolThread(threading.Thread):
    """A thread of a pool.

    Attributes:
        working: whether the thread works rather than waits; a pause waits for it.
        ended: whether the thread has no more work.
        elsewhere_s: seconds that processes worked on the current piece, minus the wait for them.
    """

    def __init__(self, pool: "ThreadPool", serve: Callable[["PoolThread"], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._pool, self._serve = pool, serve
        self.working = self.ended = False
        self.elsewhere_s = 0.0

    def start(self) -> None:
        """Start from another thread: an interrupt while ``Thread.start`` waits breaks the lock it holds."""
        _thread.start_new_thread(super().start, ())

    def run(self) -> None:
        self._pool.threads.append(self)
        try:
            with suppress(Shutdown):
                self._serve(self)
        finally:
            self.working, self.ended = False, True

    def begin_work(self) -> None:
        """Begin to work after any pause; raise Shutdown if the pool has stopped."""
        self.working = True
        while self._pool.paused_by is not None and not self._pool.stopping:
            self.working = False
            time.sleep(_LOOK_EVERY_S)
            self.working = True
        if self._pool.stopping:
            raise Shutdown


class ThreadPool:
    """Threads of several maps, which start, pause and stop together.

    Attributes:
        maps: the maps.
        threads: the threads that have started.
        stopping: whether the threads must end.
        paused_by: id of the thread that requested a pause, or None.
    """

    def __init__(self) -> None:
        self.maps: list[OrderedMap[Any, Any]] = []
        self.threads: list[PoolThread] = []
        self.stopping = False
        self.paused_by: int | None = None
        self._process: int | None = None  # that started the threads

    def start(self, ordered: "OrderedMap[Any, Any]") -> None:
        """Start the threads of a map."""
        self._process = os.getpid()
        for _ in range(ordered.wanted):
            PoolThread(self, ordered.serve, f"adaecho-{ordered.name}").start()

    def run_in_thread(self, work: Callable[[], Result], *, after_stop: bool = False) -> Result:
        """Return the result of ``work()``, called in a thread of the pool.

        Python raises KeyboardInterrupt in the main thread only, so an interrupt cannot cut the work short.
        A stop prevents work that has not begun, unless ``after_stop`` is set.
        """
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
        """Let every thread end after its current work."""
        self.stopping = True
        for ordered in self.maps:
            ordered.wake()

    def join(self, wait_s: float | None = None) -> bool:
        """Wait up to ``wait_s`` for the threads after ``stop``; return whether all have ended."""
        deadline, here = None if wait_s is None else time.monotonic() + wait_s, threading.current_thread()
        while self.started_here and not all(one.ended or one is here for one in list(self.threads)):
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def pause(self) -> None:
        """Return when no thread works. Threads start no further work until ``resume``."""
        try:
            if self.paused_by is None:
                self.paused_by = threading.get_ident()
            while any(thread.working for thread in list(self.threads)):
                time.sleep(_LOOK_EVERY_S)
        except BaseException:  # Ctrl-C: the caller may continue without a resume
            self.resume()
            raise

    def resume(self) -> None:
        """End a pause."""
        self.paused_by = None

    def resume_for_caller(self) -> None:
        """End a pause if the pausing thread requests a batch, since it would wait forever.

        An interrupt at the end of a pause therefore leaves no thread paused.
        """
        if self.paused_by == threading.get_ident():
            self.resume()

    @property
    def started_here(self) -> bool:
        """Whether this process started threads. A forked child has none of them."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        """Raise RuntimeError in a child forked from the process with the threads."""
        if self._process is not None and not self.started_here:
            raise RuntimeError(
                f"this process was forked from process {self._process}, where this EchoLoader began to "
                "iterate; its threads do not exist here; create a loader in this process, or start the "
                "process before the first batch, or with the start method 'spawn'"
            )


class InlineMap(Generic[Claim, Result]):
    """``work(claim())`` in the calling thread.

    Args:
        claim: returns the next piece of work, or None after the last; called by one thread at a time.
        work: processes a piece; called in parallel.

    Attributes:
        wanted: number of threads.
        at_once: pieces processed in parallel.
        claim_s, work_s: seconds spent in each.
        blocked_s: seconds that callers waited.
        upstream: the map whose results claims wait for; that wait does not count as work.
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
    """``work(claim())`` in several threads, with results in the order of the claims.

    Args:
        pool: pool of the threads.
        claim, work: as in ``InlineMap``.
        threads: number of threads.
        at_once: pieces processed in parallel; by default the number of threads.
        window: largest number of pieces claimed but not yet delivered.
        name: name of the threads.
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
        self._turn, self._ended = threading.Lock(), False  # the lock is held by the claiming thread
        self._pieces: SimpleQueue[Any] = SimpleQueue()  # a queue for the outcome of each claim, in order
        self._room: SimpleQueue[Any] = SimpleQueue()  # one entry for each piece that may be claimed
        for _ in range(max(window, 1)):
            self._room.put(None)
        pool.maps.append(self)

    def wake(self) -> None:
        """Wake waiting threads so that they see a stop."""
        self._pieces.put(_WAKE)
        self._room.put(_WAKE)

    def get(self) -> Result | None:
        """Return the next result, or None after the last. Raise the error of its claim or work, or Shutdown.

        While a thread of the same pool waits here, a pause or stop of the pool applies to it.
        """
        start, thread = time.perf_counter(), threading.current_thread()
        if isinstance(thread, PoolThread):
            thread.working = False
        piece = self._taken(self._pieces)
        good, result = piece.get()
        if isinstance(thread, PoolThread):
            thread.begin_work()
        self.blocked_s += time.perf_counter() - start
        if result is _END:
            self._put_end(True, _END)  # for further calls
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
        """Process pieces until the last one or a stop."""
        spent_s: float | None = 0.0
        while spent_s is not None:
            spent_s = self._serve_one(thread, spent_s)

    def _serve_one(self, thread: PoolThread, spent_s: float) -> float | None:
        """Process the next piece; return the seconds spent, or None if there is no more work."""
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
"""By thread that waits for a batch: since when, and a function that names the reason."""
_watching: dict[int, bool] = {}  # by process
_TELL_AFTER_S = 10.0


def tell_long_waits() -> None:
    """Start the thread that logs the reason of waits of 10 s, and again after each doubling."""
    if not _watching.setdefault(os.getpid(), False):
        _watching[os.getpid()] = True
        _thread.start_new_thread(_watch, ())


def _watch() -> None:
    told: dict[float, float] = {}  # the next line of each wait
    while True:
        time.sleep(_TELL_AFTER_S / 20)
        waits = list(WAITS.values())
        told = {since: told.get(since, _TELL_AFTER_S) for since, _ in waits}
        for since, reason in waits:
            waited_s = time.monotonic() - since
            if waited_s >= told[since]:
                told[since] *= 2
                _LOG.warning("waiting for a batch for %.0f s: %s", waited_s, reason())


def picklable_error(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with the same message if pickle cannot send it."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        copied = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            copied.add_note(note)
        return copied
