"""Processes forked from this one, which answer requests in turn.

Forked, not spawned: no main script is imported again, and nothing has to pickle but requests and answers.
Arrays come back in memory that both map. A process ends with its pipe, or with its parent.
"""

import copyreg
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from adaecho.echo.threads.workers import PoolThread, Stopped

_LEAST_BYTES = 1 << 14  # below, the pipe is as quick
_LOOK_EVERY_S = 0.5  # whether the parent lives
_END_S = 1.0  # for a process to end by itself
Handler = Callable[..., Any]
Ticket = tuple[threading.Lock, threading.Lock]
"""Held until the answer before, and until this one, has been received."""


class ProcessDiedError(RuntimeError):
    """A worker process ended by itself or was killed, whatever example it worked on."""


def can_fork() -> bool:
    """Whether processes can be forked: on macOS its libraries don't survive it; daemons may have none."""
    forks = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    return forks and not multiprocessing.current_process().daemon


@dataclass
class Shared:
    """An answer whose large arrays lie in the memory of its slot: gone when the slot is used again."""

    value: Any


class Forked:
    """One process, once it is started.

    Args:
        make: gives, in the process, what answers requests there.
        others: forked before, to whose pipes it must not hold on.
        slots: of arrays of answers that may be there at once.
        slot_bytes: of each; a page is committed when it is first written.
    """

    def __init__(
        self, make: Callable[[], Handler], others: Sequence["Forked"], *, slots: int, slot_bytes: int
    ) -> None:
        self._memory = mmap.mmap(-1, slots * slot_bytes)
        self._sending, self._last = threading.Lock(), threading.Lock()
        self.closed = False
        context = multiprocessing.get_context("fork")
        self._connection, self._there = context.Pipe()
        held = [self._connection, *(other._connection for other in others)]
        self._process = context.Process(
            target=_serve, args=(self._there, held, self._memory, slot_bytes, make), name="adaecho",
            daemon=True,
        )  # fmt: skip

    def start(self) -> None:
        """Fork it."""
        # No interrupt before the process ignores them; Python warns of a fork beside others' threads.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._there.close()

    def send(self, slot: int, *request: Any) -> Ticket:
        """Ask, and receive the answer whatever else happens: not by a thread that may be interrupted."""
        body = _dumps((slot, request))
        with self._sending:
            ticket = self._last, threading.Lock()
            self._last = ticket[1]
            ticket[1].acquire()
            with suppress(OSError):  # the answer will tell
                self._connection.send_bytes(body)
        return ticket

    def receive(self, ticket: Ticket) -> Any:
        """The answer, or what was raised for it.

        Raises:
            ProcessDiedError: there will be none.
        """
        start, (before, turn) = time.perf_counter(), ticket
        before.acquire()
        try:
            spans, body = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            if self.closed:
                raise Stopped from None
            self._process.join(_END_S)
            raise ProcessDiedError(
                f"a worker process of this EchoLoader ended with exit code {self._process.exitcode}, in "
                "__getitem__, decode or augment, or killed for want of memory; num_workers=0 runs them here"
            ) from None
        finally:
            turn.release()
        parts = [memoryview(self._memory)[begin:end] for begin, end in spans]
        good, result, busy_s = pickle.loads(body, buffers=parts)
        thread = threading.current_thread()
        if isinstance(thread, PoolThread):
            thread.elsewhere_s += busy_s - (time.perf_counter() - start)
        if not good:
            error, where = result
            error.add_note(f"in a worker process:\n{where}")
            raise error from None
        return result.value if isinstance(result, Shared) else result

    def kill(self) -> None:
        """End it in the middle of whatever it does; those who wait for answers give up."""
        self.closed = True
        if self._process.ident is not None:
            self._process.kill()

    def close(self) -> None:
        """End it, once nobody waits for an answer."""
        self.closed = True
        self._connection.close()
        if self._process.ident is not None:
            self._process.join(_END_S)
            self._process.kill()
            self._process.join()


def sendable(error: Exception) -> Exception:
    """The error, or one that says the same where it can't be sent from a process to another."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        copied = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            copied.add_note(note)
        return copied


def _dumps(value: Any, put: Callable[[pickle.PickleBuffer], bool] | None = None) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=put)
    # A tensor would bring all of the memory that it looks at a part of.
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: lambda one: one.clone().__reduce_ex__(5)}
    pickler.dump(value)
    return file.getvalue()


def _serve(
    connection: Any, others: list[Any], memory: Any, slot_bytes: int, make: Callable[[], Handler]
) -> None:
    # These are the parent's. Ignored they would be by the commands, too, that a dataset starts and ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for other in others:
        other.close()  # or their ends would not be seen
    torch.set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)  # whose threads stayed in the parent
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests, os.getppid()), daemon=True).start()
    handler = make()
    while (request := requests.get()) is not None:
        start, spans = time.perf_counter(), list[tuple[int, int]]()
        try:
            slot, arguments = pickle.loads(request)
            result = handler(*arguments)
            put = None
            if isinstance(result, Shared):
                put = _shared(memory, slot * slot_bytes, (slot + 1) * slot_bytes, spans)
            body = _dumps((True, result, time.perf_counter() - start), put)
        except Exception as error:
            spans, body = [], _dumps((False, (sendable(error), traceback.format_exc().rstrip()), 0.0))
        try:
            connection.send_bytes(pickle.dumps((spans, body)))
        except OSError:  # nobody is there any more
            return


def _listen(connection: Any, requests: SimpleQueue[bytes | None], parent: int) -> None:
    """Take requests as they come, so that who sends them never waits."""
    with suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(_LOOK_EVERY_S):
                requests.put(connection.recv_bytes())
    requests.put(None)
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(0)


def _shared(
    memory: mmap.mmap, begin: int, end: int, spans: list[tuple[int, int]]
) -> Callable[[pickle.PickleBuffer], bool]:
    """For a pickler: puts what is large and fits into a slot, and notes where; whether it did not."""

    def put(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        start = -(-(spans[-1][1] if spans else begin) // 64) * 64
        if raw.nbytes < _LEAST_BYTES or start + raw.nbytes > end:
            return True
        memory[start : start + raw.nbytes] = raw
        spans.append((start, start + raw.nbytes))
        return False

    return put
