"""Examples in processes of their own: which process has which is known here, what they are only there.

Whoever reads an example owns it: keeps it until its last use, and decodes and augments it. Here there are
tokens in the place of examples: serial and owner in one number, so that all that is decided on identities is
decided as ever, and batches come bit for bit as they do without processes. What is iterated here is sent to
the owners.
"""

import os
import threading
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.batch.batches import Making
from adaecho.echo.memory import recycle
from adaecho.echo.memory.budget import check_memory
from adaecho.echo.memory.pool import Examples, singles_of
from adaecho.echo.memory.tree import Columns, duplicate, num_bytes, same_layout, stack
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import Fresh
from adaecho.echo.read.chunks import Reader
from adaecho.echo.threads.processes import Forked, Shared

_MEMORY_BYTES = 1 << 28  # for the arrays of one batch on their way, of which each owner has a part
_SMALL_BYTES = 1 << 20  # of two batches

Tokens = NDArray[np.int64]
"""Serial and owner of an example, in one number."""


class Contents:
    """What an owner has, in its process.

    Args:
        reader, making: of the loader.
        resident: the source's rows lie in memory: each use is read, and nothing is kept.
    """

    def __init__(self, reader: Reader, making: Making, *, resident: bool) -> None:
        # What draws from the global generators against the rules draws otherwise in each process.
        key = int.from_bytes(os.urandom(8), "little")
        keyed.seed_globally(key, key >> 1)
        reader.go_alone()
        self._reader, self._making, self._resident = reader, making, resident
        self._examples: dict[int, Any] = {}  # by serial

    def __call__(self, what: str, *arguments: Any) -> Any:
        return self._read(*arguments) if what == "read" else self._made(*arguments)

    def _read(self, claim: Any) -> Fresh:
        fresh = self._reader.work(claim)
        read = fresh.examples
        singles = map(duplicate, read.examples()) if isinstance(read, Columns) else read
        self._examples.update(zip(fresh.serials.tolist(), singles, strict=True))
        size = 0
        if len(fresh.serials):
            size = read.example_bytes if isinstance(read, Columns) else num_bytes(read[0])
        return Fresh(fresh.serials, None, fresh.next_index, fresh.bad, size)

    def _made(self, items: keyed.Items, last: NDArray[np.bool_]) -> Any:
        serials = items >> keyed.ECHO_BITS
        if self._resident:
            examples = singles_of(self._reader.work(self._reader.again(serials)).examples)
        else:  # writing into one use must not change the others
            examples = [
                self._examples.pop(serial) if is_last else duplicate(self._examples[serial])
                for serial, is_last in zip(serials.tolist(), last.tolist(), strict=True)
            ]
        made = self._making.augmented(items, examples)
        if isinstance(made, list) and self._making.length is None:
            made = stack(made) or made
        return Shared(made) if isinstance(made, Columns) else made


class Sent(NamedTuple):
    """A batch's requests: its slot, how many examples, and for each owner which of them, and its ticket."""

    slot: int
    length: int
    parts: list[tuple[NDArray[np.int64], Forked, Any]]


class Owners:
    """As many processes as there are workers, in the place of the reader, the pool and the augmentation.

    Args:
        number: of processes.
        world: ranks that share out serials.
        reader, making: of the loader.
        buffered: examples in the buffer before batches.
        resident: rows in memory; reading them costs nothing and never fails, and need not be done before they
            are used.
    """

    rows = 1 << 62

    def __init__(
        self,
        number: int,
        reader: Reader,
        making: Making,
        *,
        world: int,
        buffered: int,
        resident: Columns | None,
    ) -> None:
        self._number, self._reader, self._making, self._world = number, reader, making, world
        self._buffered, self._resident = buffered, resident is not None
        self._example_bytes = 0 if resident is None else resident.example_bytes
        self._left: dict[int, int] = {}  # uses of each token that are still to leave
        self._all: list[Forked] = []
        self._choosing, self._closing = threading.Lock(), threading.Lock()
        self._reads, self._given = [0] * number, [0] * number  # at work, and examples of each so far
        self._slots: SimpleQueue[int] = SimpleQueue()
        self._num_slots = number + 2  # of threads that make batches, and one that makes some again
        for slot in range(self._num_slots):
            self._slots.put(slot)

    # By the consumer

    def begin(self) -> None:
        """Fork them. No thread of the loader may be at work."""
        reader, making, resident = self._reader, self._making, self._resident
        slot_bytes = _MEMORY_BYTES // self._number // 64 * 64
        for _ in range(self._number):
            forked = Forked(
                lambda: Contents(reader, making, resident=resident), self._all, slots=self._num_slots,
                slot_bytes=slot_bytes,
            )  # fmt: skip
            self._all.append(forked)  # before an interrupt could lose it
            forked.start()

    def kill(self) -> None:
        """End them, whatever they do."""
        for forked in self._all:
            forked.kill()

    def close(self) -> None:
        """End the processes, while nobody waits for their answers."""
        with self._closing:
            while self._all:
                self._all.pop().close()

    # By threads

    def read(self, claim: Any) -> Fresh:
        """What was claimed is read by one of them: tokens."""
        serials = claim[0]
        if self._resident:  # which need not be read before they are used
            owners = serials // self._world % self._number
            return Fresh(serials, serials * self._number + owners, claim[2])
        with self._choosing:  # one that is not behind, and has had few
            number = min(range(self._number), key=lambda n: (self._reads[n], self._given[n]))
            self._reads[number] += 1
            self._given[number] += len(serials)
        try:
            forked = self._all[number]
            fresh: Fresh = forked.receive(forked.send(0, "read", claim))
        finally:
            with self._choosing:
                self._reads[number] -= 1
        if fresh.example_bytes and not self._example_bytes:
            check_memory(self._buffered * fresh.example_bytes)
            self._example_bytes = fresh.example_bytes
        fresh.examples = fresh.serials * self._number + number
        return fresh

    def batches_at_once(self) -> int:
        """Two of small examples, of which the crossing costs most; one until the first have been read."""
        pair = 2 * self._making.batch_size * self._example_bytes
        return 2 if 0 < pair <= _SMALL_BYTES else 1

    # As a pool, by one thread at a time

    def insert(self, tokens: Tokens, repeats: NDArray[np.int64]) -> Tokens:
        """Each will leave so many times; the tokens [n] are the rows."""
        self._left.update(zip(tokens.tolist(), repeats.tolist(), strict=True))
        return tokens

    def take(self, tokens: Tokens, items: keyed.Items) -> Sent:
        """Ask for one augmented use of each; in order, so that an owner knows which is the last."""
        last = np.zeros(len(tokens), dtype=bool)  # [n]
        for index, token in enumerate(tokens.tolist()):
            self._left[token] -= 1
            if not self._left[token]:
                del self._left[token]
                last[index] = True
        owners, slot, parts = tokens % self._number, self._slots.get(), []
        for number in np.unique(owners).tolist():
            where, forked = np.flatnonzero(owners == number), self._all[number]
            parts.append((where, forked, forked.send(slot, "made", items[where], last[where])))
        return Sent(slot, len(items), parts)

    def augmented(self, _: keyed.Items, sent: Any) -> Examples:
        """The augmented examples that were asked for."""
        try:
            return _together(sent.length, _received(sent.parts))
        finally:
            self._slots.put(sent.slot)


Parts = list[tuple[NDArray[np.int64], Examples]]


def _received(sent: list[Any]) -> Parts:
    """All answers; raises the first error once the others have come."""
    parts, failed = [], None
    for where, forked, ticket in sent:
        try:
            parts.append((where, forked.receive(ticket)))
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return parts


def _together(length: int, parts: Parts) -> Examples:
    """Parts of so many examples, each with its places [n], as one."""
    first = parts[0][1]
    if all(isinstance(p, Columns) and isinstance(first, Columns) and same_layout(p, first) for _, p in parts):
        assert isinstance(first, Columns)
        whole = Columns(first.form, [recycle.empty((length, *a.shape[1:]), a.dtype) for a in first.arrays])
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
