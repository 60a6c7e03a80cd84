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
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from adaecho.echo.memory.tree import Columns
from adaecho.echo.threads import generators
from adaecho.echo.threads.workers import GivenUp, PoolThread

_SLOT_BYTES = 1 << 26  # for the arrays of one answer; a page is committed when it is first written
_LEAST_BYTES = 1 << 14  # below, the pipe is as quick
_LOOK_EVERY_S = 0.5  # whether the parent lives
_END_S = 1.0  # for a process to end by itself
Handler = Callable[..., Any]
Ticket = tuple[threading.Lock, threading.Lock]
"""Held until the answer before, and until this one, has been received."""


class ProcessDiedError(RuntimeError):
    """A worker process ended by itself or was killed, whatever example it worked on."""


def can_fork() -> bool:
    """Whether processes can be forked: on macOS its libraries don't survive it."""
    return "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"


class Forked:
    """One process.

    Args:
        make: gives, in the process, what answers requests there.
        others: forked before, to whose pipes it must not hold on.
        slots: of arrays of answers that may be there at once.
    """

    def __init__(self, make: Callable[[], Handler], others: Sequence["Forked"] = (), slots: int = 0) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, there = context.Pipe()
        self._memory = mmap.mmap(-1, slots * _SLOT_BYTES) if slots else None
        close = [self._connection, *(other._connection for other in others)]
        self._process = context.Process(
            target=_serve, args=(there, close, self._memory, make), name="adaecho", daemon=True
        )
        self._sending, self._last = threading.Lock(), threading.Lock()
        self.closed = False
        # No interrupt before the process ignores them; Python warns of a fork beside others' threads.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        there.close()

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
            good, result, busy_s = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            if self.closed:
                raise GivenUp from None
            self._process.join(_END_S)
            raise ProcessDiedError(
                f"a worker process of this EchoLoader ended with exit code {self._process.exitcode}, in "
                "__getitem__, decode or augment, or killed for want of memory; num_workers=0 runs them here"
            ) from None
        finally:
            turn.release()
        thread = threading.current_thread()
        if isinstance(thread, PoolThread):
            thread.elsewhere_s += busy_s - (time.perf_counter() - start)
        if not good:
            error, where = result
            error.add_note(f"in a worker process:\n{where}")
            raise error from None
        if isinstance(result, Columns):
            result.arrays = [self._array(array) for array in result.arrays]
        return result

    def _array(self, array: Any) -> Any:
        """An array that lies in the memory of a slot, as long as the slot is not used again."""
        if isinstance(array, np.ndarray):
            return array
        start, dtype, shape = array
        flat = np.frombuffer(self._memory, dtype, int(np.prod(shape)), start)  # type: ignore[call-overload]
        return flat.reshape(shape)

    def kill(self) -> None:
        """End it in the middle of whatever it does; those who wait for answers give up."""
        self.closed = True
        self._process.kill()

    def close(self) -> None:
        """End it, once nobody waits for an answer."""
        self.closed = True
        self._connection.close()
        self._process.join(_END_S)
        self._process.kill()
        self._process.join()


def in_fork(function: Callable[[], Any]) -> Any:
    """What a function returns, called in a process of its own: whatever it opens is not open here."""
    forked = Forked(lambda: lambda: function())
    try:
        return forked.receive(forked.send(0))
    finally:
        forked.close()


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5)
    # A tensor would bring all of the memory that it looks at a part of.
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: lambda one: one.clone().__reduce_ex__(5)}
    pickler.dump(value)
    return file.getvalue()


def _serve(connection: Any, others: list[Any], memory: Any, make: Callable[[], Handler]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # these are the parent's
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for other in others:
        other.close()  # or their ends would not be seen
    torch.set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)  # whose threads stayed in the parent
    generators.own = True
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests, os.getppid()), daemon=True).start()
    handler = make()
    while (request := requests.get()) is not None:
        start = time.perf_counter()
        try:
            slot, arguments = pickle.loads(request)
            result = handler(*arguments)
            if isinstance(result, Columns) and memory is not None:
                result = Columns(result.form, _placed(result.arrays, memory, slot * _SLOT_BYTES))
            answer = _dumps((True, result, time.perf_counter() - start))
        except Exception as error:
            answer = _dumps((False, (_sendable(error), traceback.format_exc().rstrip()), 0.0))
        try:
            connection.send_bytes(answer)
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


def _placed(arrays: list[Any], memory: mmap.mmap, start: int) -> list[Any]:
    """Where arrays were put in a slot; those that are small or don't fit, as they are."""
    placed, end = [], start + _SLOT_BYTES
    for array in arrays:
        if array.nbytes < _LEAST_BYTES or start + array.nbytes > end:
            placed.append(array)
            continue
        flat = np.frombuffer(memory, array.dtype, array.size, start)
        flat.reshape(array.shape)[...] = array
        placed.append((start, array.dtype, array.shape))
        start += -(-array.nbytes // 64) * 64
    return placed


def _sendable(error: Exception) -> Exception:
    try:
        copied: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            copied.add_note(note)
    return copied
