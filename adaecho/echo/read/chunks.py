"""Upstream of the echo stage: read, decode and, under example_after_augmentation, augment.

A reader hands out its work in two parts: ``claim`` settles, in order and in one thread at a time, what is to
be read next; ``work`` may run in many threads at once.
"""

import errno
import http.client
import sys
import traceback
import urllib.error
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.memory.pool import Examples
from adaecho.echo.memory.pytree import Columns, Rows, num_bytes, stack, with_own_arrays
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import BadExample, FreshBlock
from adaecho.echo.threads import InlineMap, OrderedMap, picklable_error

_NEVER_THE_EXAMPLE = (
    ConnectionError, TimeoutError, MemoryError, FileNotFoundError, PermissionError, urllib.error.URLError,
    http.client.HTTPException,
)  # fmt: skip
# What a file of wrong content, or a wrong name, can cause by itself.
_OF_THE_EXAMPLE = (None, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG)
_NETWORK_CLIENTS = (
    "aiohttp.", "azure.core.", "botocore.", "gcsfs.", "google.api_core.", "google.auth.", "grpc.",
    "httpcore.", "httpx.", "huggingface_hub.", "requests.", "urllib3.",
)  # fmt: skip
_HOPELESS = 1000  # beyond the budget twice: bad examples one after another that are met again and again

NONE_SKIPPED = (
    "max_bad_examples=0 (data.max_bad_examples of a run) skips none; a larger budget skips and lists them in "
    "bad_examples"
)  # whoever reads it has made a loader, or has typed a run's command


def is_of_machine(error: Exception) -> bool:
    """Whether machine or network failed, so that the error is raised and never counted as a bad example.

    These are the built-in errors of connections, memory and missing files; an ``OSError`` with the number of
    a cause such as a full disk or too many open files (one that a decoder raises has none); and whatever is
    of a class of a network client, wrong values apart.
    """
    if isinstance(error, _NEVER_THE_EXAMPLE):
        return True
    if isinstance(error, OSError) and error.errno not in _OF_THE_EXAMPLE:
        return True
    of_client = any(f"{kind.__module__}.".startswith(_NETWORK_CLIENTS) for kind in type(error).__mro__)
    return of_client and not isinstance(error, ValueError)


class BadExamples:
    """Examples that could not be read or decoded: listed, and an error beyond the budget.

    A row of the source that is bad in every pass is listed once, where it was first met.

    Attributes:
        found: these.
        numbers: the local numbers of all, rising: what the stream has to know. Only appended to.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._in_a_row = budget, 0
        self.found: list[dict[str, Any]] = []
        self.numbers: list[int] = []

    def add(self, chunk: FreshBlock) -> None:
        """List those of a chunk; raises the error of one beyond the budget."""
        self._in_a_row = 0 if len(chunk.serials) else self._in_a_row + len(chunk.bad)
        for bad in chunk.bad:
            if self._in_a_row > 2 * self._budget + _HOPELESS:
                raise bad.told(f"while reading {bad.origin}; the last {self._in_a_row} examples were all bad")
            self.numbers.append(bad.index)
            if bad.row is not None and any(known["row"] == bad.row for known in self.found):
                continue
            self.found.append({"index": bad.index, "origin": bad.origin, "error": bad.reason, "row": bad.row})
            if len(self.found) > self._budget:
                raise bad.told(f"while reading {bad.origin}; {self._explanation()}")

    def go_back(self, index: int) -> None:
        """Strike off those from a local number on: they were read ahead."""
        self.found = [bad for bad in self.found if bad["index"] < index]
        self.numbers = [number for number in self.numbers if number < index]

    def _explanation(self) -> str:
        if not self._budget:
            return NONE_SKIPPED
        others = ", ".join(bad["origin"] for bad in self.found[-6:-1])
        return f"more bad examples than max_bad_examples={self._budget} allows; the last before it: {others}"


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that made the loader or asked for a batch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("adaecho."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


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
    ) -> FreshBlock:
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
                    error, where = picklable_error(error), traceback.format_exc().rstrip()
                bad.append(BadExample(serial // world, origin(position), error, reason, row, where))
            else:
                positions.append(position)
                good.append(example)
        if bad:
            serials = serials[positions]
        return FreshBlock(serials, self.finish(serials, good), end, bad)


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

    def work(self, claim: Any) -> FreshBlock:
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


class PrefetchQueue:
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
        self,
        claim: Callable[[int], Any | None],
        work: Callable[[Any], FreshBlock],
        bad: BadExamples,
        index: int,
    ) -> None:
        self._bad, self._wanted = bad, 1
        self.map: OrderedMap[Any, FreshBlock] | InlineMap[Any, FreshBlock]
        self.map = InlineMap(lambda: claim(self._wanted), work)
        self.index, self.examples = index, 0

    def take_again(self, count: int) -> FreshBlock:
        """Some of the examples that were read before; raises the error of a bad one."""
        self._wanted = count
        chunk = self.map.get()
        assert chunk is not None
        for bad in chunk.bad:
            raise bad.told(
                f"while reading {bad.origin} again, as the buffer held it; it could be read before"
            )
        return chunk

    def take(self, count: int) -> FreshBlock | None:
        """``count`` local numbers further, or as many as a chunk has; None at the end of the iteration."""
        self._wanted = count
        chunk = self.map.get()
        if chunk is not None:
            self.examples += chunk.next_index - self.index
            self.index = chunk.next_index
            self._bad.add(chunk)
        return chunk
