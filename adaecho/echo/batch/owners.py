"""Examples in processes of their own: which process has which is known here, what they are only there.

Whoever reads an example owns it: keeps it until its last use, and decodes and augments it. Here there are
tokens in the place of examples: serial and owner in one number, so that all that is decided on identities is
decided as ever, and batches come bit for bit as they do without processes. What an owner keeps is a cache:
what it lacks it reads again. Only of what is iterated here, which can't be, examples are sent to the owners.
"""

import threading
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.batch.batches import Making
from adaecho.echo.memory import recycle
from adaecho.echo.memory.budget import check_memory
from adaecho.echo.memory.pool import Examples
from adaecho.echo.memory.tree import Columns, duplicate, num_bytes, same_layout, stack
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import Fresh
from adaecho.echo.read.chunks import Reader, Serials
from adaecho.echo.threads.processes import Forked, Shared
from adaecho.echo.threads.workers import GivenUp

_MEMORY_BYTES = 1 << 28  # for the arrays of one batch on their way, of which each owner has a part
_SMALL_BYTES = 1 << 20  # of two batches

Tokens = NDArray[np.int64]


class TokenPool:
    """Tokens of examples that lie elsewhere, with a count of the uses of each that are still to leave."""

    rows = 1 << 62

    def __init__(self) -> None:
        self._left: dict[int, int] = {}
        self._total: dict[int, int] = {}

    def insert(self, tokens: Tokens, repeats: NDArray[np.int64]) -> Tokens:
        """The tokens [n] are the rows."""
        uses = dict(zip(tokens.tolist(), repeats.tolist(), strict=True))
        self._left.update(uses)
        self._total.update(uses)
        return tokens

    def take(self, tokens: Tokens) -> Tokens:
        """One use of each: [n, 2], the token, and with the last one how many uses there were, else 0."""
        taken = np.stack([tokens, np.zeros_like(tokens)], axis=1)
        for place, token in enumerate(tokens.tolist()):
            self._left[token] -= 1
            if not self._left[token]:
                del self._left[token]
                taken[place, 1] = self._total.pop(token)
        return taken

    def begin_anew(self) -> None:
        """The owners are others, which have used none yet."""
        self._total = dict(self._left)


class Contents:
    """What an owner has, in its process.

    Args:
        reader, making: of the loader.
        owned: whether a serial is one of its own.
    """

    def __init__(self, reader: Reader, making: Making, owned: Callable[[int], bool]) -> None:
        reader.go_alone()
        reader.keep_again(owned)
        self._reader, self._making = reader, making
        self._examples: dict[int, Any] = {}  # by serial
        # By serial: uses known to come, less those that came. Requests of threads overtake one another,
        # so that the last use may come before others.
        self._left = Counter[int]()

    def __call__(self, what: str, *arguments: Any) -> Any:
        return self._read(*arguments) if what == "read" else self._made(*arguments)

    def _read(self, claim: Any) -> Fresh:
        fresh = self._reader.work(claim)
        self._keep(fresh.serials.tolist(), fresh.examples)
        size = num_bytes(fresh.examples[0]) if len(fresh.serials) else 0
        return Fresh(fresh.serials, None, fresh.next_index, fresh.bad, size)

    def _keep(self, serials: list[int], examples: Examples) -> None:
        singles = map(duplicate, examples.examples()) if isinstance(examples, Columns) else examples
        self._examples.update(zip(serials, singles, strict=True))

    def _made(self, items: keyed.Items, totals: NDArray[np.int64]) -> Any:
        serials = (items >> keyed.ECHO_BITS).tolist()
        lacking = np.array(sorted({serial for serial in serials if serial not in self._examples}), np.int64)
        if len(lacking):
            self._keep(lacking.tolist(), self._reader.reread(lacking))
        for serial, total in zip(serials, totals.tolist(), strict=True):
            self._left[serial] += total - 1
        uses, examples = Counter(serials), []
        for serial in serials:
            uses[serial] -= 1
            if uses[serial] or self._left[serial]:  # writing into this use must not change the others
                examples.append(duplicate(self._examples[serial]))
            else:
                del self._left[serial]
                examples.append(self._examples.pop(serial))
        made = self._making.augmented(items, examples)
        if isinstance(made, list) and self._making.length is None:
            made = stack(made) or made
        return Shared(made) if isinstance(made, Columns) else made


class Owners:
    """As many processes as there are workers, in the place of the reader and of the augmentation.

    Args:
        number: of processes.
        world: ranks that share out serials.
        reader, making: of the loader.
        buffered: examples in the buffer before batches.
        resident: rows in memory; reading them costs nothing and never fails, and need not be done before they
            are used.

    Attributes:
        pool: of their tokens.
    """

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
        self.pool = TokenPool()
        self._all: list[Forked] = []
        self._choosing = threading.Lock()
        self._reads, self._given = [0] * number, [0] * number  # at work, and examples of each so far
        self._slots: SimpleQueue[int] = SimpleQueue()
        self._num_slots = number + 2  # of threads that make batches, and one that makes some again
        for slot in range(self._num_slots):
            self._slots.put(slot)

    # By the consumer

    def begin(self) -> None:
        """Fork them, unless they are there. No thread of the loader may be at work."""
        reader, making, room = self._reader, self._making, _MEMORY_BYTES // self._number
        if not self._all:
            self.pool.begin_anew()
        while (number := len(self._all)) < self._number:
            forked = Forked(
                lambda: Contents(reader, making, lambda serial: self.tokens(serial) % self._number == number),
                self._all, slots=self._num_slots, slot_bytes=room // 64 * 64,
            )  # fmt: skip
            self._all.append(forked)
        reader.keep_again(lambda _: False)  # they have it

    def hold(self, serials: Serials) -> None:
        """What a resume finds in buffers, one for each use: who owns it reads it when it lacks it."""
        uses = Counter(self.tokens(serials).tolist())
        self.pool.insert(np.array([*uses], np.int64), np.array([*uses.values()], np.int64))

    def kill(self) -> None:
        """End them, whatever they do."""
        for forked in self._all:
            forked.kill()

    def close(self) -> None:
        """End them, while nobody waits for them."""
        while self._all:
            self._all.pop().close()

    # By threads

    def _of(self, number: int) -> Forked:
        try:
            return self._all[number]
        except IndexError:  # closed by another thread
            raise GivenUp from None

    def read(self, claim: Any) -> Fresh:
        """What was claimed is read by one of them: tokens."""
        serials = claim[0]
        if self._resident:
            return Fresh(serials, self.tokens(serials), claim[2])
        with self._choosing:  # one that is not behind, and has had few
            number = min(range(self._number), key=lambda n: (self._reads[n], self._given[n]))
            self._reads[number] += 1
            self._given[number] += len(serials)
        try:
            forked = self._of(number)
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

    def tokens(self, serials: Any) -> Any:
        """Of what need not be read before it is used: each an owner."""
        return serials * self._number + serials // self._world % self._number

    def tokens_of(self, items: keyed.Items) -> Tokens:
        """The tokens of items of these."""
        return np.asarray(self.tokens(items >> keyed.ECHO_BITS))

    def augmented(self, items: keyed.Items, taken: Any) -> Examples:
        """The augmented examples of items [n], of which a pool gave these tokens."""
        tokens, totals = np.asarray(taken).T  # [n] each
        owners = tokens % self._number
        slot, sent = self._slots.get(), []
        try:
            for forked, number in [(self._of(number), number) for number in np.unique(owners).tolist()]:
                where = np.flatnonzero(owners == number)
                sent.append((where, forked, forked.send(slot, "made", items[where], totals[where])))
            return _together(len(items), _received(sent))
        finally:
            self._slots.put(slot)


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
