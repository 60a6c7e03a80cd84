"""Upstream of the echo stage: read, decode and, under example_after_augmentation, augment.

A reader hands out its work in two parts: ``claim`` settles, in order and in one thread at a time, what is to
be read next; ``work`` may run in many threads at once.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.memory.pool import Examples
from adaecho.echo.memory.tree import Columns, Rows, num_bytes, stack, with_own_arrays
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import Bad, Fresh
from adaecho.echo.read.failures import BadExamples, is_of_machine
from adaecho.echo.threads.processes import sendable
from adaecho.echo.threads.workers import InlineMap, OrderedMap

# Examples beyond this, e.g. decoded photographs, travel one by one: copying them into stacks would cost more
# than the interpreter's work for each.
_LARGE_BYTES = 1 << 16

Serials = NDArray[np.int64]
ReaderState = tuple[list[Any], list[Any]]
"""Where to begin to read, and fingerprints of what was read: plain values."""


class Tried:
    """``decode`` for its errors alone: a good example goes on as it is stored."""

    def __init__(self, decode: Callable[[Any], Any]) -> None:
        self._decode = decode

    def __call__(self, example: Any) -> Any:
        self._decode(with_own_arrays(example))
        return example


@dataclass
class Preparation:
    """What happens to an example between storage and the echo stage.

    Attributes:
        decode: one example from its stored form, deterministic; None where it is stored decoded.
        augment: applied to many, before the echo; None where it comes after.
        stacked: whether to stack examples of one shape into arrays.
        length: how many examples a whole batch holds; None where examples are read.
        alone: in a process of its own, where examples stay one by one.
    """

    decode: Callable[[Any], Any] | None = None
    augment: Callable[[keyed.Items, Examples], Examples] | None = None
    stacked: bool = True
    length: Callable[[Any], int] | None = None
    alone: bool = False

    def own(self, example: Any) -> Any:
        """An example as the loader may keep it and write into it; whole batches are copied later."""
        return with_own_arrays(example) if self.stacked else example

    def examples_in(self, read: Any) -> int:
        """How many examples there are in what is read at once."""
        if self.length is None:
            return 1
        try:
            return self.length(read if self.decode is None else self.decode(with_own_arrays(read)))
        except Exception:
            return 0  # a bad one, which was never counted

    def finish(self, serials: Serials, examples: Examples) -> Examples:
        """Augment where that comes before the echo, and stack what can be stacked."""
        if self.augment is not None and len(serials):
            examples = self.augment(serials << keyed.ECHO_BITS, examples)
        if isinstance(examples, Columns) or not self.stacked or self.alone or not examples:
            return examples
        return examples if num_bytes(examples[0]) > _LARGE_BYTES else stack(examples) or examples

    def fresh(
        self,
        serials: Serials,
        end: int,
        fetch: Callable[[int], Any],
        origin: Callable[[int], str],
        world: int,
        rows: Sequence[int] | Rows | None = None,
    ) -> Fresh:
        """Read and decode examples, and ``finish`` the good ones; the bad ones apart.

        The source's arrays, which it may keep, or overwrite with its next example, are copied at once: what
        ``decode`` and ``augment`` write into is the loader's. What ``decode`` returns isn't copied.

        Args:
            serials: of the examples, shape [n].
            end: local number of the first one after them.
            fetch: reads the one at a position.
            origin: names the one at a position.
            world: number of ranks.
            rows: which examples of the source they are, where that can be told.
        """
        good, positions, bad = [], [], []
        for position, serial in enumerate(serials.tolist()):
            try:
                example = fetch(position)
                if self.stacked or self.decode is not None:
                    example = with_own_arrays(example)
                example = example if self.decode is None else self.decode(example)
            except Exception as error:
                if is_of_machine(error):
                    error.add_note(f"while reading {origin(position)}")
                    raise
                row = None if rows is None else int(rows[position])
                reason, where = f"{type(error).__name__}: {error}", ""
                if self.alone:  # it is sent without its traceback
                    error, where = sendable(error), traceback.format_exc().rstrip()
                bad.append(Bad(serial // world, origin(position), error, reason, row, where))
            else:
                positions.append(position)
                good.append(example)
        if bad:
            serials = serials[positions]
        return Fresh(serials, self.finish(serials, good), end, bad)


class Reader(Protocol):
    """Fresh examples of one rank in serial order.

    Attributes:
        reads_again: whether what is claimed ``again`` is read from the source, rather than by ``resume``.
    """

    reads_again: bool

    def begin(self, iteration: int, passes: int | None, abandoned_at: int | None = None) -> int:
        """Go to where an iteration of so many passes begins (None: endless); its first local number.

        ``abandoned_at`` is the local number at which the one before was given up, None if it ended.
        """

    def claim(self, count: int) -> Any | None:
        """Settle the next ``count`` fresh examples; None at the end of the iteration."""

    def work(self, claim: Any) -> Fresh:
        """Read, decode and prepare what was claimed."""

    def resume(
        self, index: int, iteration: int, passes: int | None, needed: Serials, state: ReaderState
    ) -> int:
        """Go to a local number; how many examples had to be read again for that.

        ``needed`` are the serials of the earlier examples that will be claimed ``again``.
        """

    def again(self, serials: Serials) -> Any:
        """A claim of some of the needed serials, rising, each once."""

    def go_alone(self) -> None:
        """This is a process of its own from here on: what is read stays there, one by one."""

    def state(self, oldest_serial: int, index: int) -> ReaderState:
        """What ``resume`` needs to go to a local number, reading again from a serial on."""

    def close(self) -> None:
        """Let go of whatever is open."""
        return


class FreshQueue:
    """Fresh examples from a reader, which may work ahead in chunks.

    Args:
        claim, work: of the reader; inline it reads exactly what is asked for.
        bad: where bad examples are listed, in order.
        index: local number at which it begins.

    Attributes:
        index: local number of the next to take.
        examples: taken, the bad ones too.
        map: of what is read, maybe in threads; one that works ahead may be put in its place.
    """

    def __init__(
        self, claim: Callable[[int], Any | None], work: Callable[[Any], Fresh], bad: BadExamples, index: int
    ) -> None:
        self._bad, self._wanted = bad, 1
        self.map: OrderedMap[Any, Fresh] | InlineMap[Any, Fresh]
        self.map = InlineMap(lambda: claim(self._wanted), work)
        self.index, self.examples = index, 0

    def take_again(self, count: int) -> Fresh:
        """Some of the examples that were read before; raises the error of a bad one."""
        self._wanted = count
        chunk = self.map.get()
        assert chunk is not None
        for bad in chunk.bad:
            raise bad.told(
                f"while reading {bad.origin} again, as the buffer held it; it could be read before"
            )
        return chunk

    def take(self, count: int) -> Fresh | None:
        """``count`` local numbers further, or as many as a chunk has; None at the end of the iteration."""
        self._wanted = count
        chunk = self.map.get()
        if chunk is not None:
            self.examples += chunk.next_index - self.index
            self.index = chunk.next_index
            self._bad.add(chunk)
        return chunk
