"""Background threads: ordered, bounded, parallel maps that can pause, stop and go on without losing anything.

Threads, not processes: reading, decoding and NumPy or torch kernels release the interpreter's lock.

They are crash-only. A signal handler's exception, e.g. KeyboardInterrupt, may come up in the main thread
between any two calls, in a library's locks too. So that thread takes no lock that a worker takes: it speaks
to them by queues written in C, of which each call happens or does not. After an interrupt they are told to
stop, and others begin anew at the consumer's place; nothing here is mended.
"""

import _thread
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

Claim = TypeVar("Claim")
Result = TypeVar("Result")
Outcome = tuple[bool, Any]
"""Whether it came to its end, and the result or the error."""

_WAKE, _END = object(), object()
_LOOK_EVERY_S = 0.05  # whether threads have ended, where nothing tells


class Stopped(BaseException):  # a signal between threads that no handler of errors should catch
    """The pool is stopping; who waits for a result gives up, has changed nothing and can ask again later."""


class GivenUp(BaseException):
    """A piece of work was given up because the pool is stopping: it has to be done once more."""


class Helper(Protocol):
    """Something that belongs to one thread."""

    def __call__(self, *arguments: Any) -> Any:
        """Ask it."""

    def close(self) -> None:
        """End it."""


class Bell:
    """An event of which ringing is one call in C, so that any thread may, the garbage collector too."""

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Let all go who wait, now and later."""
        self._rung.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it rings, so long at most; whether it has."""
        try:
            self._rung.get(timeout=seconds)
        except Empty:
            return False
        self._rung.put(None)
        return True


class PoolThread(threading.Thread):
    """A thread of a pool; its ``helpers`` are closed when it ends.

    It is ``leaving``, under the pool's lock, from when it will do no more work: still alive, but another
    must be hired in its place. It has ``ended`` once nothing is left to do.
    """

    def __init__(self, pool: "ThreadPool", target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._pool = pool
        self.helpers: dict[Any, Helper] = {}  # of the dataset and of each augmentation, by whose they are
        self.leaving = self.ended = False

    def run(self) -> None:
        try:
            super().run()
            for helper in self.helpers.values():
                helper.close()
        finally:
            self.ended = True
            self._pool.left.put(None)

    def check_open(self) -> None:
        """Raises GivenUp where the loader is being closed: nobody will take what is waited for."""
        if self._pool.closing:
            raise GivenUp

    def rest(self, seconds: float) -> None:
        """Sleep, no longer than until the pool is to stop.

        Raises:
            GivenUp: it is to stop.
        """
        if self._pool.stop_bell.wait(seconds):
            raise GivenUp


class ThreadPool:
    """What the threads of one loader share: whether to work, pause or stop.

    Args:
        stopped: called after a stop, once no thread works any more; must not wait for anything.

    Attributes:
        stopping: whether threads are to end; ``stop_bell`` rings then.
        closing: whether they are to end for good.
        left: told of each thread that has ended.
    """

    def __init__(self, stopped: Callable[[], None]) -> None:
        self._stopped = stopped
        self.stopping = self.paused = self.closing = False
        self.stop_bell, self._gate = Bell(), Bell()
        self.left: SimpleQueue[None] = SimpleQueue()
        self._idle: SimpleQueue[None] = SimpleQueue()  # told of each thread that rests in a pause
        self._lock = threading.Lock()  # of the threads alone
        self._working = 0
        self._paused_by: int | None = None
        self._staffed = False  # no thread is missing
        self._maps: list[OrderedMap[Any, Any]] = []
        self._process: int | None = None  # in which there may be threads

    def add(self, ordered: "OrderedMap[Any, Any]") -> None:
        """Take a map's threads into the pool."""
        self._maps.append(ordered)

    # By the consumer

    def go(self) -> None:
        """Start the threads that are missing."""
        if self._staffed:
            return
        self.stop_bell, self._process = Bell(), os.getpid()
        self.stopping, self._staffed = False, True
        # By a thread, which no signal handler interrupts: started here, they could be left half started.
        _thread.start_new_thread(self._hire, ())

    def stop(self) -> None:
        """Let every thread end once the work in its hands is done; what is finished is kept for later."""
        if self._stayed_behind:
            return
        self.stopping, self._staffed = True, False
        gate, self._gate = self._gate, Bell()
        for bell in (self.stop_bell, gate):
            bell.ring()
        for ordered in self._maps:
            ordered.wake()
        if not self._at_work():
            self._stopped()

    def join(self, wait_s: float | None = None) -> bool:
        """Wait for the threads after ``stop``, so long at most; whether all have ended."""
        if self._stayed_behind:
            return True
        deadline = None if wait_s is None else time.monotonic() + wait_s
        here = threading.current_thread()
        while not all(thread.ended or thread is here for thread in self._threads()):
            if deadline is not None and time.monotonic() > deadline:
                return False
            with suppress(Empty):  # another thread may wait too, and be told in this one's place
                self.left.get(timeout=_LOOK_EVERY_S)
        return True

    def pause(self) -> None:
        """Return once no thread works; those that wait go on waiting until ``resume``."""
        if not self.paused:
            self._gate, self._paused_by = Bell(), threading.get_ident()
            self.paused = True
        try:
            while self._working:
                with suppress(Empty):
                    self._idle.get(timeout=1)
        except BaseException:  # Ctrl-C: the caller may go on, and must not wait for a resume
            self.resume()
            raise

    def resume(self) -> None:
        """End a pause."""
        self.paused = False
        self._gate.ring()
        self._paused_by = None  # last: where an interrupt came before, a resume is still to be made

    def resume_for_caller(self) -> None:
        """End a pause if the thread that made it asks for a batch: it would wait for ever.

        So an interrupt that falls into the end of a pause leaves nobody paused.
        """
        if self._paused_by == threading.get_ident():
            self.resume()

    @property
    def _stayed_behind(self) -> bool:
        """Whether this process was forked from the one with the threads, which may have held any lock."""
        return self._process is not None and self._process != os.getpid()

    def check_process(self) -> None:
        """Raises RuntimeError in a process that was forked from the one with the threads."""
        if self._stayed_behind:
            raise RuntimeError(
                f"this EchoLoader began to iterate in process {self._process}, from which this one was "
                "forked, and its threads stayed there; make a loader in this process, or start it before the "
                "first batch or by the start method 'spawn'"
            )

    def _threads(self) -> list[PoolThread]:
        return [thread for ordered in self._maps for thread in list(ordered.threads)]

    def _at_work(self) -> bool:
        return not all(thread.leaving for thread in self._threads())

    # By its threads

    def _hire(self) -> None:
        with self._lock:
            for ordered in self._maps:
                if not self.stopping:
                    ordered.hire(self)

    def enter(self) -> None:
        """Begin to work, once there is no pause; raises Stopped on stopping."""
        while True:
            with self._lock:
                self._working += 1
            if not (self.paused or self.stopping):
                return
            self.rest()
            if self.stopping:
                raise Stopped
            gate = self._gate
            if self.paused:
                gate.wait()

    def rest(self) -> None:
        """Work no more, or wait."""
        with self._lock:
            self._working -= 1
        if self.paused:
            self._idle.put(None)

    def leaves(self, thread: PoolThread, *, ended: bool) -> bool:
        """Whether this thread will do no more work: its map has ended, or the pool is still stopping."""
        with self._lock:
            thread.leaving = ended or self.stopping
            last = self.stopping and not self._at_work()
        if last:
            self._stopped()
        return thread.leaving


class InlineMap(Generic[Claim, Result]):
    """``work(claim())``, in the thread that asks."""

    wanted = 1

    def __init__(self, claim: Callable[[], Claim | None], work: Callable[[Claim], Result]) -> None:
        self._claim, self._work = claim, work
        self.claim_s = self.work_s = 0.0  # time in which it was busy
        self.blocked_s = 0.0
        self.upstream: AnyMap | None = None

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
        pool: what the threads belong to.
        claim: the next piece of work, or None when there is no more; called by one thread at a time.
        work: what to do with it; called in parallel.
        threads: how many.
        window: pieces claimed and not yet delivered, at most.
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
    ) -> None:
        self._pool, self._claim, self._work = pool, claim, work
        self.wanted, self._name = threads, name
        self.threads: list[PoolThread] = []  # started, and perhaps ended
        self._turn = threading.Lock()  # held by the thread that claims
        self._claimed, self._ended = 0, False
        self._order = threading.Lock()  # held by the thread that puts results in order
        self._results: dict[int, Outcome] = {}  # that others are still to come before
        self._following = 0
        self._ready: SimpleQueue[Any] = SimpleQueue()  # outcomes in order
        self._room: SimpleQueue[Any] = SimpleQueue()  # one for each piece that may be claimed
        for _ in range(max(window, 1)):
            self._room.put(None)
        self._got: Outcome | None = None  # and not delivered, since the pool stopped
        self._over = False
        self.claim_s = self.work_s = 0.0  # in which threads were busy
        self.blocked_s = 0.0  # of those who waited here
        # Whom claims wait for: that time is not busy.
        self.upstream: AnyMap | None = None
        pool.add(self)

    # By the consumer

    def wake(self) -> None:
        """Let those who wait see that the pool is stopping."""
        self._ready.put(_WAKE)
        self._room.put(_WAKE)

    def get(self) -> Result | None:
        """The next result; None after the last. Raises what claim or work raised for it.

        A thread of the same pool pauses and stops with it while it waits.
        """
        start = time.perf_counter()
        if self._got is None and not self._over:
            self._wait()
        self.blocked_s += time.perf_counter() - start
        if self._over or self._got is None:
            return None
        (good, result), self._got = self._got, None
        if result is _END:
            self._over = True
            return None
        self._room.put(None)
        if not good:
            raise result
        return result  # type: ignore[no-any-return]

    def _wait(self) -> None:
        """Wait for the next outcome."""
        if not isinstance(threading.current_thread(), PoolThread):
            self._got = self._outcome()
            return
        self._pool.rest()
        self._got = self._outcome()
        self._pool.enter()  # where this raises Stopped, what has come is there later

    def _outcome(self) -> Outcome:
        while (outcome := self._ready.get()) is _WAKE:
            if self._pool.stopping:
                raise Stopped
        return outcome  # type: ignore[no-any-return]

    # By its threads

    def hire(self, pool: ThreadPool) -> None:
        """Start missing threads (the pool's lock held, in a thread that no signal handler interrupts)."""
        self.threads = [thread for thread in self.threads if not thread.ended]
        at_work = sum(not thread.leaving for thread in self.threads)
        try:
            for _ in range(0 if self._ended else self.wanted - at_work):
                thread = PoolThread(pool, self._run, f"adaecho-{self._name}")
                thread.start()
                self.threads.append(thread)
        except RuntimeError as error:  # no more threads can be had: those there are do the same work
            if all(thread.leaving for thread in self.threads):
                reason = (
                    f"{error}: too little memory for one more, or too low a limit of them; lower num_workers"
                )
                self._fail(RuntimeError(reason))

    def _run(self) -> None:
        thread = threading.current_thread()
        assert isinstance(thread, PoolThread)
        try:
            while True:
                try:
                    while self._piece():
                        pass
                except Stopped:
                    if self._pool.leaves(thread, ended=False):
                        return
                else:
                    self._pool.leaves(thread, ended=True)
                    return
        except BaseException as error:  # the interpreter is going down, or a bug here: never a silent hang
            self._fail(error)
            raise

    def _piece(self) -> bool:
        """Claim and do one piece of work; False when there is no more."""
        with self._turn:
            if self._ended:
                return False
            self._await_room()
            number = self._claimed
            try:
                self._pool.enter()
            except Stopped:
                self._room.put(None)
                raise
            claim = self._claimed_piece()
            if claim is None:
                self._pool.rest()
                return False
            self._claimed += 1
        start = time.perf_counter()
        outcome: Outcome
        try:
            outcome = True, self._work(claim)
        except BaseException as error:
            outcome = False, error
        self._deliver(number, outcome, time.perf_counter() - start)
        self._pool.rest()
        return True

    def _await_room(self) -> None:
        """Wait until one more piece may be claimed (its turn held)."""
        while not self._pool.stopping:
            if self._room.get() is not _WAKE:
                return
        raise Stopped

    def _claimed_piece(self) -> Claim | None:
        """The next claim (its turn held); None where there is none, which has been told."""
        start, elsewhere = time.perf_counter(), self._blocked_elsewhere()
        try:
            claim = self._claim()
        except Stopped:  # in a wait, which it does not work in
            self._room.put(None)
            raise
        except BaseException as error:
            self._fail(error)
            return None
        self.claim_s += time.perf_counter() - start - (self._blocked_elsewhere() - elsewhere)
        if claim is None:
            self._ended = True
            self._deliver(self._claimed, (True, _END))
        return claim

    def _blocked_elsewhere(self) -> float:
        return 0.0 if self.upstream is None else self.upstream.blocked_s

    def _deliver(self, number: int, outcome: Outcome, spent_s: float = 0.0) -> None:
        with self._order:
            self.work_s += spent_s
            self._results[number] = outcome
            while self._following in self._results:
                self._ready.put(self._results.pop(self._following))
                self._following += 1

    def _fail(self, error: BaseException) -> None:
        """Deliver an error in its turn; nothing can be claimed after it."""
        self._ended = True
        self._deliver(self._claimed, (False, error))


AnyMap = InlineMap[Any, Any] | OrderedMap[Any, Any]
