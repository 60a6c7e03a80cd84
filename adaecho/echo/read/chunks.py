"""Upstream of the echo stage: read, decode and, for example_after_augmentation, augment.

A reader has two parts. ``claim`` fixes the next examples, in order and in one thread at a time. ``work``
reads them and may run in many threads. Errors of reading are here, too.
"""

import errno
import http.client
import sys
import traceback
import urllib.error
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
# Errors that a file of wrong content, or a wrong name, can cause.
_OF_THE_EXAMPLE = (None, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG)
_NETWORK_CLIENTS = (
    "aiohttp.", "azure.core.", "botocore.", "gcsfs.", "google.api_core.", "google.auth.", "grpc.",
    "httpcore.", "httpx.", "huggingface_hub.", "requests.", "urllib3.",
)  # fmt: skip
_HOPELESS = 1000  # consecutive bad examples, beyond twice the budget, after which reading fails

NONE_SKIPPED = (
    "max_bad_examples=0 (data.max_bad_examples of a run) skips none; a larger budget skips and lists them in "
    "bad_examples"
)  # the reader of this message created a loader, or typed a run's command


def is_of_machine(error: Exception) -> bool:
    """Whether the machine or network failed: the loader raises the error and does not count a bad example.

    These are the built-in errors of connections, memory and missing files; an ``OSError`` with an errno such
    as that of a full disk (decoders raise it without errno); and errors of network clients other than
    ``ValueError``.
    """
    if isinstance(error, _NEVER_THE_EXAMPLE):
        return True
    if isinstance(error, OSError) and error.errno not in _OF_THE_EXAMPLE:
        return True
    of_client = any(f"{kind.__module__}.".startswith(_NETWORK_CLIENTS) for kind in type(error).__mro__)
    return of_client and not isinstance(error, ValueError)


class BadExamples:
    """List of examples that could not be read or decoded; more than the budget is an error.

    A row that is bad in every epoch is listed once.

    Attributes:
        found: the listed examples.
        numbers: local numbers of all bad examples, ascending, for the stream. Iteration only appends.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._in_a_row = budget, 0
        self.found: list[dict[str, Any]] = []
        self.numbers: list[int] = []

    def add(self, chunk: FreshBlock) -> None:
        """List the bad examples of a chunk; raise the error of one beyond the budget."""
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
        """Remove entries from a local number on, which were read ahead."""
        self.found = [bad for bad in self.found if bad["index"] < index]
        self.numbers = [number for number in self.numbers if number < index]

    def _explanation(self) -> str:
        if not self._budget:
            return NONE_SKIPPED
        others = ", ".join(bad["origin"] for bad in self.found[-6:-1])
        return f"more bad examples than max_bad_examples={self._budget} allows; the last before it: {others}"


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that created the loader or requested a batch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("adaecho."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# Larger examples, e.g. decoded photographs, are not stacked: the copy would take longer than handling each.
_LARGE_BYTES = 1 << 16

Serials = NDArray[np.int64]
ReaderState = tuple[list[Any], list[Any]]
"""Marks to begin reading at, and fingerprints of examples: plain values."""


class Tried:
    """Calls ``decode`` only to detect bad examples; good ones stay encoded."""

    def __init__(self, decode: Callable[[Any], Any]) -> None:
        self._decode = decode

    def __call__(self, example: Any) -> Any:
        self._decode(with_own_arrays(example))
        return example


@dataclass
class Preparation:
    """The steps between storage and the echo stage.

    Attributes:
        decode: decodes one example, deterministic; None if the source yields decoded examples.
        augment: augments many examples before the echo; None if that comes after it.
        stacked: whether to stack examples of one shape into arrays.
        length: number of examples in a whole batch; None if the source yields examples.
        alone: whether this runs in a worker process, where examples stay one by one.
    """

    decode: Callable[[Any], Any] | None = None
    augment: Callable[[keyed.Items, Examples], Examples] | None = None
    stacked: bool = True
    length: Callable[[Any], int] | None = None
    alone: bool = False

    def own(self, example: Any) -> Any:
        """Return an example that the loader may cache and write into. Whole batches are copied later."""
        return with_own_arrays(example) if self.stacked else example

    def examples_in(self, read: Any) -> int:
        """Number of examples in one item of the source."""
        if self.length is None:
            return 1
        try:
            return self.length(read if self.decode is None else self.decode(with_own_arrays(read)))
        except Exception:
            return 0  # bad batches do not count

    def finish(self, serials: Serials, examples: Examples) -> Examples:
        """Augment, if that comes before the echo, and stack the examples if possible."""
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
        """Read and decode examples; ``finish`` the good ones and list the bad ones.

        Arrays of the source are copied at once: the source may cache or overwrite them, and ``decode`` and
        ``augment`` may write into them. The result of ``decode`` is not copied.

        Args:
            serials: serials of the examples, shape [n].
            end: local number of the first example after them.
            fetch: reads the example at a position in ``serials``.
            origin: names the example at a position.
            world: number of ranks.
            rows: rows of the examples in the source, if known.
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


class PrefetchQueue:
    """Queue of fresh examples from a reader, which may read ahead in chunks.

    Args:
        claim, work: methods of the reader; inline it reads exactly the requested number.
        bad: list of bad examples.
        index: local number of the first example.
        drawn: called for each block whose reading drew random numbers.
        begins: whether the first example is the first of an iteration.

    Attributes:
        index: local number of the next example.
        examples: number of examples so far, including bad ones.
        map: the map that reads; the caller may replace it by one with threads.
    """

    def __init__(
        self,
        claim: Callable[[int], Any | None],
        work: Callable[[Any], FreshBlock],
        bad: BadExamples,
        index: int,
        drawn: Callable[[], None],
        begins: bool,
    ) -> None:
        self._bad, self._wanted, self._drawn = bad, 1, drawn
        self.map: OrderedMap[Any, FreshBlock] | InlineMap[Any, FreshBlock]
        self.map = InlineMap(lambda: claim(self._wanted), work)
        self.index, self.examples = index, 0
        self._first_bad: BadExample | None = None
        self._has_good = not begins

    def take_again(self, count: int) -> FreshBlock:
        """Return examples that were read before; raise the error of a bad one."""
        self._wanted = count
        chunk = self.map.get()
        assert chunk is not None
        for bad in chunk.bad:
            raise bad.told(f"while reading {bad.origin} again for the buffer; the first read succeeded")
        return chunk

    def take(self, count: int) -> FreshBlock | None:
        """Return the next ``count`` examples, or a chunk; None at the end of the iteration."""
        self._wanted = count
        chunk = self.map.get()
        if chunk is None and self._first_bad is not None and not self._has_good:
            bad = self._first_bad
            raise bad.told(f"while reading {bad.origin}; all {self.examples} examples were bad")
        if chunk is not None:
            self._has_good |= len(chunk.serials) > 0
            self._first_bad = self._first_bad or next(iter(chunk.bad), None)
            self.examples += chunk.next_index - self.index
            self.index = chunk.next_index
            self._bad.add(chunk)
            if chunk.draws:
                self._drawn()
        return chunk
