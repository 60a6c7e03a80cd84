"""Worker processes that read, store, decode and augment examples.

Until its last use, each example stays in the worker that read it. The loader's process receives only
augmented examples. It refers to each stored example by a *token*, an integer that identifies the example and
its worker.
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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.echo.batch.batches import BatchBuilder
from adaecho.echo.memory.pool import Examples
from adaecho.echo.memory.pytree import Columns, duplicate, empty, same_layout, stack
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import FreshBlock
from adaecho.echo.read import Reader
from adaecho.echo.threads import PoolThread, Shutdown, picklable_error

_LEAST_BYTES = 1 << 14  # smaller arrays go through the pipe, which is just as fast for them
_LOOK_EVERY_S = 0.5  # interval between checks that the parent process is alive
_END_S = 1.0  # time for a process to exit on its own before it is killed
Handler = Callable[..., Any]
Ticket = SimpleQueue[Any]
"""A queue that receives the answer to one request, or None if the process ended before it answered."""
Requests = SimpleQueue[bytes]
"""Requests in the order in which they were sent. An empty request ends the worker."""


class ProcessDiedError(RuntimeError):
    """A worker process exited or was killed."""


def can_fork() -> bool:
    """Return whether this process can fork workers."""
    # macOS libraries do not work after a fork. Daemon processes may not have children.
    forks = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    return forks and not multiprocessing.current_process().daemon


@dataclass
class Shared:
    """Marks an answer whose large arrays are sent in shared memory, where a later answer overwrites them."""

    value: Any


class WorkerProcess:
    """A forked worker process that answers requests.

    Answers come through a pipe, except for their large arrays, which come through a slot of shared memory.
    """

    # ``make`` creates the request handler in the new process. The new process closes the pipes of the
    # ``others``, which were forked earlier.
    def __init__(
        self, make: Callable[[], Handler], others: Sequence["WorkerProcess"], *, slots: int, slot_bytes: int
    ) -> None:
        # Unused memory is free, because the operating system allocates a page only when it is first written.
        self._memory = mmap.mmap(-1, slots * slot_bytes)
        self._sending, self._sent, self._waiting = threading.Lock(), 0, dict[int, Ticket]()
        self.closed = self._ended = False
        # A thread that waits for one answer must not delay the others.
        self._receiver = threading.Thread(target=self._receive, name="adaecho-answers", daemon=True)
        # With fork, the main script is not imported again, and only requests and answers must be pickled.
        context = multiprocessing.get_context("fork")
        self._connection, self._there = context.Pipe()
        held = [self._connection, *(other._connection for other in others)]
        self._process = context.Process(
            target=_serve, args=(self._there, held, self._memory, slot_bytes, make), name="adaecho",
            daemon=True,
        )  # fmt: skip

    def start(self) -> None:
        """Fork the process."""
        # Ctrl-C is blocked until the child ignores it. Python's warning about a fork while threads exist is
        # suppressed.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._there.close()

    def begin_receiving(self) -> None:
        """Start the thread that receives answers. Call this only after all workers have been forked."""
        self._receiver.start()

    def send(self, slot: int, *request: Any) -> Ticket:
        """Send a request to the worker process, and return the queue that will receive its answer."""
        # The main thread must not call this, because an interrupt there could split the message.
        # ``request`` is "read" or "augment", followed by the arguments. ``slot`` is the number of the
        # shared-memory slot for large arrays in the answer.
        ticket = Ticket()
        with self._sending:
            number = self._sent = self._sent + 1
            if self._ended:
                ticket.put(None)
                return ticket
            self._waiting[number] = ticket
            # The last byte is the kind of request. Pickle ignores bytes after the end of a value.
            body = _dumps((slot, request)) + bytes([request[0] == "read"])
            with suppress(OSError):  # the receiving thread notices the end of the process
                self._connection.send_bytes(body)
        return ticket

    def _receive(self) -> None:
        """Receive answers until the process ends, and put each answer into the queue of its request."""
        with suppress(EOFError, OSError):
            while True:
                number, *answer = pickle.loads(self._connection.recv_bytes())
                self._waiting.pop(number).put(answer)
        with self._sending:
            self._ended = True
        for ticket in self._waiting.values():
            ticket.put(None)

    def receive(self, ticket: Ticket) -> Any:
        """Wait for the answer to a request and return it.

        Raises:
            Shutdown: the loader has ended the process.
            ProcessDiedError: the process died before it answered.
            Exception: the error that the request caused in the process.
        """
        start, answer = time.perf_counter(), ticket.get()
        if answer is None:
            if self.closed:
                raise Shutdown
            self._process.join(_END_S)
            raise ProcessDiedError(
                f"a worker process of this EchoLoader ended with exit code {self._process.exitcode} in "
                "__getitem__, decode or augment, or was killed for lack of memory; num_workers=0 runs these "
                "in the main process"
            )
        spans, body = answer
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
        """Kill the process. Threads that are waiting for its answers then stop waiting."""
        self.closed = True
        if self._process.ident is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, by force if necessary. No thread may be waiting for an answer."""
        self.closed = True
        with suppress(OSError):
            self._connection.send_bytes(b"")
        if self._process.ident is not None:
            self._process.join(_END_S)
            self._process.kill()
            self._process.join()
        if self._receiver.ident is not None:
            self._receiver.join(_END_S)
        self._connection.close()


def _dumps(value: Any, put: Callable[[pickle.PickleBuffer], bool] | None = None) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=put)
    # Pickle would store all memory behind a tensor, even if the tensor is a view of only part of it.
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: lambda one: one.clone().__reduce_ex__(5)}
    pickler.dump(value)
    return file.getvalue()


def _serve(
    connection: Any, others: list[Any], memory: Any, slot_bytes: int, make: Callable[[], Handler]
) -> None:
    # The parent handles these signals. They are not set to SIG_IGN, because commands that a dataset starts
    # would inherit that.
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for other in others:
        other.close()  # with a copy open here, another worker could not see that its pipe was closed
    torch.set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)  # the threads of OpenCV exist only in the parent
    arrived: Requests = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, arrived, os.getppid()), daemon=True).start()
    handler = make()
    # For batch requests and read requests: the waiting ones, in order, and the recent mean time.
    waiting, mean_s, number = (deque[Any](), deque[Any]()), [0.0, 0.0], 0
    while True:
        while not any(waiting) or not arrived.empty():
            if not (request := arrived.get()):
                return
            number += 1
            waiting[request[-1]].append((number, request))
        # The faster kind goes first. A batch then does not wait for slow reads, and other workers do not wait
        # for a read behind slow augmentations.
        quick = mean_s[1] < mean_s[0]
        serial, request = (waiting[quick] or waiting[not quick]).popleft()
        start, spans = time.perf_counter(), list[tuple[int, int]]()
        try:
            slot, arguments = pickle.loads(request)
            result = handler(*arguments)
            put = None
            if isinstance(result, Shared):
                put = _shared(memory, slot * slot_bytes, (slot + 1) * slot_bytes, spans)
            body = _dumps((True, result, busy_s := time.perf_counter() - start), put)
            mean_s[request[-1]] += (busy_s - mean_s[request[-1]]) / 8
        except Exception as error:
            spans, body = [], _dumps((False, (picklable_error(error), traceback.format_exc().rstrip()), 0.0))
        try:
            connection.send_bytes(pickle.dumps((serial, spans, body)))
        except OSError:  # the parent has closed the pipe
            return


def _listen(connection: Any, arrived: Requests, parent: int) -> None:
    """Receive requests in the worker process, and end this process when its parent has ended."""
    with suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(_LOOK_EVERY_S):
                if not (request := connection.recv_bytes()):
                    break  # an empty request ends the worker
                arrived.put(request)
    arrived.put(b"")
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(0)


def _shared(
    memory: mmap.mmap, begin: int, end: int, spans: list[tuple[int, int]]
) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a pickler callback that copies large arrays to a given range of bytes in shared memory."""

    # It appends the start and end offsets of each copy to ``spans``. Small arrays, and those that do not fit,
    # stay in the pickle.
    def put(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        start = -(-(spans[-1][1] if spans else begin) // 64) * 64
        if raw.nbytes < _LEAST_BYTES or start + raw.nbytes > end:
            return True
        memory[start : start + raw.nbytes] = raw
        spans.append((start, start + raw.nbytes))
        return False

    return put


_MEMORY_BYTES = 1 << 28  # shared memory for the arrays of one batch, over all workers

Tokens = NDArray[np.int64]
"""Tokens, each of which combines the serial number of an example with the number of its worker."""


class WorkerStore:
    """Answers the requests in a worker process: reads, stores and augments examples."""

    def __init__(self, reader: Reader, builder: BatchBuilder) -> None:
        # User code might draw from the global random generators, although it must not. After a fork, all
        # workers would draw the same numbers, so each gets its own random seed.
        key = int.from_bytes(os.urandom(8), "little")
        keyed.seed_globally(key, key >> 1)
        reader.go_alone()
        self._reader, self._builder = reader, builder
        self._examples: dict[int, Any] = {}  # by serial

    def __call__(self, what: str, *arguments: Any) -> Any:
        return self._read(*arguments) if what == "read" else self._augment(*arguments)

    def _read(self, claim: Any) -> FreshBlock:
        fresh = self._reader.work(claim)
        read = fresh.examples
        singles = map(duplicate, read.examples()) if isinstance(read, Columns) else read
        self._examples.update(zip(fresh.serials.tolist(), singles, strict=True))
        return FreshBlock(fresh.serials, None, fresh.next_index, fresh.bad, fresh.draws)

    def _augment(self, items: keyed.Items, last: NDArray[np.bool_]) -> Any:
        serials = items >> keyed.ECHO_BITS
        # Each use but the last gets a copy, because augmentation may write into the example.
        examples = [
            self._examples.pop(serial) if is_last else duplicate(self._examples[serial])
            for serial, is_last in zip(serials.tolist(), last.tolist(), strict=True)
        ]
        made = self._builder.augmented(items, examples)
        if isinstance(made, list) and self._builder.length is None:
            made = stack(made) or made
        return Shared(made) if isinstance(made, Columns) else made


class PendingBatch(NamedTuple):
    """A batch whose augmented examples have been requested from the workers, but not received yet."""

    slot: int  # number of the shared-memory slot for the answers
    length: int  # number of examples
    # For each worker: the places of its examples in the batch, int64 [n], the worker, and a ``Ticket``.
    parts: list[tuple[NDArray[np.int64], WorkerProcess, Any]]


class WorkerProcesses:
    """All worker processes of a loader, which read, store and augment its examples."""

    def __init__(self, number: int, reader: Reader, builder: BatchBuilder) -> None:
        self._number, self._reader, self._builder = number, reader, builder
        self._left: dict[int, int] = {}  # remaining number of uses of each token
        self._all: list[WorkerProcess] = []
        self._choosing, self._closing = threading.Lock(), threading.Lock()
        self._reads, self._given = [0] * number, [0] * number  # by worker: reads in progress, examples so far
        self._slots: SimpleQueue[int] = SimpleQueue()
        self._num_slots = 2 * number + 1  # one for each thread that makes batches, and one for a resume
        for slot in range(self._num_slots):
            self._slots.put(slot)

    # The following methods are called by a thread that no interrupt reaches.

    def begin(self) -> None:
        """Fork the processes. No thread of the loader may be working at this time."""
        reader, builder = self._reader, self._builder
        slot_bytes = _MEMORY_BYTES // self._number // 64 * 64
        for _ in range(self._number):
            worker = WorkerProcess(
                lambda: WorkerStore(reader, builder), self._all, slots=self._num_slots,
                slot_bytes=slot_bytes,
            )  # fmt: skip
            self._all.append(worker)  # before the start, because an interrupt would otherwise lose it
            worker.start()
        for worker in self._all:
            worker.begin_receiving()

    def kill(self) -> None:
        """Kill all processes."""
        for worker in self._all:
            worker.kill()

    def close(self) -> None:
        """End all processes. No thread may be waiting for an answer."""
        with self._closing:
            while self._all:
                self._all.pop().close()

    # The following methods are called by several threads at once.

    def read(self, claim: Any) -> FreshBlock:
        """Make one worker read and store examples. The result contains tokens instead of the examples."""
        serials = claim[0]
        with self._choosing:  # the least busy worker; among equals, the one with the fewest examples
            number = min(range(self._number), key=lambda n: (self._reads[n], self._given[n]))
            self._reads[number] += 1
            self._given[number] += len(serials)
        try:
            worker = self._all[number]
            fresh: FreshBlock = worker.receive(worker.send(0, "read", claim))
        finally:
            with self._choosing:
                self._reads[number] -= 1
        fresh.examples = fresh.serials * self._number + number
        return fresh

    # The following methods are the interface of a pool. Only one thread at a time calls them.

    def insert(self, tokens: Tokens, repeats: NDArray[np.int64]) -> Tokens:
        """Record how often each token's example will be used, and return the tokens as row numbers."""
        self._left.update(zip(tokens.tolist(), repeats.tolist(), strict=True))
        return tokens

    def take(self, tokens: Tokens, items: keyed.Items) -> PendingBatch:
        """Request augmented examples from the workers, without waiting for them."""
        # A worker deletes an example from its cache after its last use.
        last = np.zeros(len(tokens), dtype=bool)  # [n]
        for index, token in enumerate(tokens.tolist()):
            self._left[token] -= 1
            if not self._left[token]:
                del self._left[token]
                last[index] = True
        workers, slot, parts = tokens % self._number, self._slots.get(), []
        for number in np.unique(workers).tolist():
            where, worker = np.flatnonzero(workers == number), self._all[number]
            parts.append((where, worker, worker.send(slot, "augment", items[where], last[where])))
        return PendingBatch(slot, len(items), parts)

    def augmented(self, _: keyed.Items, sent: Any) -> Examples:
        """Wait for the examples that ``take`` requested, and return them in the order of the batch."""
        try:
            return _together(sent.length, _received(sent.parts))
        finally:
            self._slots.put(sent.slot)


Parts = list[tuple[NDArray[np.int64], Examples]]  # places in the batch, and examples, for each worker


def _received(sent: list[Any]) -> Parts:
    """Wait for the answers of all workers. If some answers are errors, raise the first error."""
    parts, failed = [], None
    for where, worker, ticket in sent:
        try:
            parts.append((where, worker.receive(ticket)))
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return parts


def _together(length: int, parts: Parts) -> Examples:
    """Combine ``length`` examples from several workers in the order of the batch."""
    first = parts[0][1]
    if all(isinstance(p, Columns) and isinstance(first, Columns) and same_layout(p, first) for _, p in parts):
        assert isinstance(first, Columns)
        whole = Columns(first.form, [empty((length, *a.shape[1:]), a.dtype) for a in first.arrays])
        for where, part in parts:
            assert isinstance(part, Columns)
            for array, values in zip(whole.arrays, part.arrays, strict=True):
                array[where] = values
        return whole
    examples: list[Any] = [None] * length
    for where, part in parts:
        singles = map(duplicate, part.examples()) if isinstance(part, Columns) else part
        for place, single in zip(where.tolist(), singles, strict=True):
            examples[place] = single
    return examples
