"""Read and prepare examples before they are repeated.

A reader's method ``claim`` selects the next examples, in one thread at a time. Its method ``work`` reads
these examples, in many threads at once.
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
# The errno values that an example with wrong content or a wrong file name can cause.
_OF_THE_EXAMPLE = (None, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG)
_NETWORK_CLIENTS = (
    "aiohttp.", "azure.core.", "botocore.", "gcsfs.", "google.api_core.", "google.auth.", "grpc.",
    "httpcore.", "httpx.", "huggingface_hub.", "requests.", "urllib3.",
)  # fmt: skip
_HOPELESS = 1000  # reading fails after this many consecutive bad examples beyond twice the budget

NONE_SKIPPED = (
    "max_bad_examples=0 (data.max_bad_examples of a run) skips no bad examples; a larger value skips some "
    "and lists them in bad_examples"
)  # it names the argument and the config key, because the user may have created a loader or started a run


def is_of_machine(error: Exception) -> bool:
    """Return whether an error comes from the machine or the network, rather than from a bad example.

    These errors include a full disk, a lost connection and a missing file.
    """
    if isinstance(error, _NEVER_THE_EXAMPLE):
        return True
    if isinstance(error, OSError) and error.errno not in _OF_THE_EXAMPLE:
        return True
    of_client = any(f"{kind.__module__}.".startswith(_NETWORK_CLIENTS) for kind in type(error).__mro__)
    return of_client and not isinstance(error, ValueError)


class BadExamples:
    """A record of the examples that could not be read or decoded."""

    def __init__(self, budget: int) -> None:
        # Up to ``budget`` bad examples are skipped. A row that is bad in several epochs counts once.
        self._budget, self._in_a_row = budget, 0
        # Each entry has the keys "index" (in this rank's reading order), "origin" (a name for messages),
        # "error" (a text) and "row" (in the source; None if unknown).
        self.found: list[dict[str, Any]] = []
        # The indices of all bad examples, ascending. A row occurs once for each epoch in which it is bad.
        # Iteration only appends to this list, so another thread can save a state at any time.
        self.numbers: list[int] = []

    def add(self, chunk: FreshBlock) -> None:
        """Record the bad examples of a block, and raise the error of the first one beyond the budget."""
        self._in_a_row = 0 if len(chunk.serials) else self._in_a_row + len(chunk.bad)
        for bad in chunk.bad:
            if self._in_a_row > 2 * self._budget + _HOPELESS:
                raise bad.noted(f"while reading {bad.origin}; the last {self._in_a_row} examples were bad")
            self.numbers.append(bad.index)
            if bad.row is not None and any(known["row"] == bad.row for known in self.found):
                continue
            self.found.append({"index": bad.index, "origin": bad.origin, "error": bad.reason, "row": bad.row})
            if len(self.found) > self._budget:
                raise bad.noted(f"while reading {bad.origin}; {self._explanation()}")

    def go_back(self, index: int) -> None:
        """Remove the bad examples from ``index`` on, because they will be read again."""
        self.found = [bad for bad in self.found if bad["index"] < index]
        self.numbers = [number for number in self.numbers if number < index]

    def _explanation(self) -> str:
        if not self._budget:
            return NONE_SKIPPED
        others = ", ".join(bad["origin"] for bad in self.found[-6:-1])
        return f"more bad examples than max_bad_examples={self._budget} allows; the previous ones: {others}"


def warn_caller(message: str) -> None:
    """Issue a warning that points to the line of user code that called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("adaecho."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# Larger examples, such as decoded photographs, are not stacked into arrays, because copying them would take
# longer than handling them one by one.
_LARGE_BYTES = 1 << 16

Serials = NDArray[np.int64]
ReaderState = tuple[list[Any], list[Any]]
"""Points at which reading can restart, and fingerprints (digests) of examples, both as plain values."""


class Tried:
    """A function that only checks that an example can be decoded, and returns it still encoded."""

    def __init__(self, decode: Callable[[Any], Any]) -> None:
        self._decode = decode

    def __call__(self, example: Any) -> Any:
        self._decode(with_own_arrays(example))
        return example


@dataclass
class Preparation:
    """The work on an example after it is read and before it is repeated, such as decoding it."""

    decode: Callable[[Any], Any] | None = None  # decodes one example
    augment: Callable[[keyed.Items, Examples], Examples] | None = None  # augments many examples at once
    stacked: bool = True  # whether to stack examples of the same shape into arrays
    length: Callable[[Any], int] | None = None  # number of examples in a batch, if the source yields batches
    in_worker: bool = False  # whether this runs in a worker process, where examples are not stacked

    def own(self, example: Any) -> Any:
        """Copy an example, so that the loader may keep and modify it. Whole batches are not copied."""
        return with_own_arrays(example) if self.stacked else example

    def examples_in(self, read: Any) -> int:
        """Return the number of examples in an item of the source: 1, or the length of a batch."""
        if self.length is None:
            return 1
        try:
            return self.length(read if self.decode is None else self.decode(with_own_arrays(read)))
        except Exception:
            return 0  # a bad batch contributes no examples

    def finish(self, serials: Serials, examples: Examples) -> Examples:
        """Augment the examples if ``augment`` is set, and stack them if possible."""
        if self.augment is not None and len(serials):
            examples = self.augment(serials << keyed.ECHO_BITS, examples)
        if isinstance(examples, Columns) or not self.stacked or self.in_worker or not examples:
            return examples
        return examples if num_bytes(examples[0]) > _LARGE_BYTES else stack(examples) or examples

    def fresh(
        self,
        serials: Serials,  # place of each example in the reading order of all ranks, int64 [n]
        next_index: int,  # place of the next example after these in the reading order of this rank
        fetch: Callable[[int], Any],  # fetch(i) reads the i-th of these examples, 0 <= i < n
        origin: Callable[[int], str],  # origin(i) returns its name for messages
        world: int,  # number of ranks
        rows: Sequence[int] | Rows | None = None,  # row of each example in the source; None if unknown
    ) -> FreshBlock:
        """Read and prepare n examples, and return them with a list of those that failed."""
        good, positions, bad = [], [], []
        for position, serial in enumerate(serials.tolist()):
            try:
                example = fetch(position)
                # The source may overwrite its arrays later, and ``decode`` and ``augment`` may write into
                # them.
                if self.stacked or self.decode is not None:
                    example = with_own_arrays(example)
                example = example if self.decode is None else self.decode(example)
            except Exception as error:
                if is_of_machine(error):
                    error.add_note(f"while reading {origin(position)}")
                    raise
                row = None if rows is None else int(rows[position])
                reason, where = f"{type(error).__name__}: {error}", ""
                if self.in_worker:  # pickle sends an error without its traceback, so the text is sent as well
                    error, where = picklable_error(error), traceback.format_exc().rstrip()
                bad.append(BadExample(serial // world, origin(position), error, reason, row, where))
            else:
                positions.append(position)
                good.append(example)
        if bad:
            serials = serials[positions]
        return FreshBlock(serials, self.finish(serials, good), next_index, bad)


class PrefetchQueue:
    """A queue of examples from the source, which threads can read before the loader needs them."""

    def __init__(
        self,
        claim: Callable[[int], Any | None],  # selects up to this many examples to read; None at the end
        work: Callable[[Any], FreshBlock],  # reads the selected examples
        bad: BadExamples,
        index: int,
        drawn: Callable[[], None],  # called if reading drew random numbers from a global generator
        begins: bool,  # whether the queue starts at the first example of an iteration
    ) -> None:
        self._bad, self._wanted, self._drawn = bad, 1, drawn
        # Calls ``claim`` and ``work``. The caller may replace it to call them in threads.
        self.map: OrderedMap[Any, FreshBlock] | InlineMap[Any, FreshBlock]
        self.map = InlineMap(lambda: claim(self._wanted), work)
        # This rank's index of the next example, and the number of examples so far, including bad ones.
        self.index, self.examples = index, 0
        # If all examples of an iteration are bad, ``take`` raises the error of the first one.
        self._first_bad: BadExample | None = None
        self._has_good = not begins

    def take_again(self, count: int) -> FreshBlock:
        """Return the next examples that a resume rereads, at most ``count`` without reading threads."""
        self._wanted = count
        chunk = self.map.get()
        assert chunk is not None
        for bad in chunk.bad:
            raise bad.noted(f"while reading {bad.origin} again for the buffer; the first read succeeded")
        return chunk

    def take(self, count: int) -> FreshBlock | None:
        """Return the next block of examples, or None at the end of the iteration.

        Without threads, the block has at most ``count`` examples. With threads, its size is fixed.

        Raises:
            Exception: too many or all examples are bad.
        """
        self._wanted = count
        chunk = self.map.get()
        if chunk is None and self._first_bad is not None and not self._has_good:
            bad = self._first_bad
            raise bad.noted(f"while reading {bad.origin}; all {self.examples} examples were bad")
        if chunk is not None:
            self._has_good |= len(chunk.serials) > 0
            self._first_bad = self._first_bad or next(iter(chunk.bad), None)
            self.examples += chunk.next_index - self.index
            self.index = chunk.next_index
            self._bad.add(chunk)
            if chunk.draws:
                self._drawn()
        return chunk
