"""The stages before the echo: read, decode and, for ``example_after_augmentation``, augment.

A reader works in two steps. ``claim`` selects the next examples, in one thread at a time. ``work`` then reads
them, in many threads at the same time.
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
# The errno values of errors that an example with wrong content, or with a wrong file name, can cause.
_OF_THE_EXAMPLE = (None, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG)
_NETWORK_CLIENTS = (
    "aiohttp.", "azure.core.", "botocore.", "gcsfs.", "google.api_core.", "google.auth.", "grpc.",
    "httpcore.", "httpx.", "huggingface_hub.", "requests.", "urllib3.",
)  # fmt: skip
_HOPELESS = 1000  # reading fails after this many consecutive bad examples beyond twice the budget

NONE_SKIPPED = (
    "max_bad_examples=0 (data.max_bad_examples of a run) skips none; a larger budget skips and lists them in "
    "bad_examples"
)  # it names both arguments, because the reader may have created a loader or started a run by a command


def is_of_machine(error: Exception) -> bool:
    """Return whether the machine or the network caused an error, and not the content of one example.

    The loader raises these errors instead of skipping the example:

    * the built-in errors of connections, memory, missing files and permissions;
    * an ``OSError`` with an errno, for example from a full disk, except EINVAL, EISDIR and ENAMETOOLONG;
    * the errors of network clients, except ``ValueError``.
    """
    if isinstance(error, _NEVER_THE_EXAMPLE):
        return True
    if isinstance(error, OSError) and error.errno not in _OF_THE_EXAMPLE:
        return True
    of_client = any(f"{kind.__module__}.".startswith(_NETWORK_CLIENTS) for kind in type(error).__mro__)
    return of_client and not isinstance(error, ValueError)


class BadExamples:
    """The examples that could not be read or decoded.

    The first one beyond the budget raises its error. A row that is bad in every epoch counts only once.

    Args:
        budget: largest number of bad examples to skip.

    Attributes:
        found: the bad examples, each as a dict with its local number, origin, error and row.
        numbers: local numbers of all bad examples in all epochs, ascending; the stream leaves them out.
            Iteration only appends to this list.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._in_a_row = budget, 0
        self.found: list[dict[str, Any]] = []
        self.numbers: list[int] = []

    def add(self, chunk: FreshBlock) -> None:
        """List the bad examples of a chunk, and raise the error of the first one beyond the budget."""
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
        """Remove the entries from local number ``index`` on. The loader will read these examples again."""
        self.found = [bad for bad in self.found if bad["index"] < index]
        self.numbers = [number for number in self.numbers if number < index]

    def _explanation(self) -> str:
        if not self._budget:
            return NONE_SKIPPED
        others = ", ".join(bad["origin"] for bad in self.found[-6:-1])
        return f"more bad examples than max_bad_examples={self._budget} allows; the last before it: {others}"


def warn_caller(message: str) -> None:
    """Issue a warning that points to the line of the user's code which called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("adaecho."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# Larger examples, such as decoded photographs, are not stacked into arrays, because copying them would take
# longer than handling them one by one.
_LARGE_BYTES = 1 << 16

Serials = NDArray[np.int64]
ReaderState = tuple[list[Any], list[Any]]
"""Points at which reading can begin, and fingerprints of examples, both as plain values."""


class Tried:
    """Decodes examples only to detect bad ones, if the buffer contains encoded examples."""

    def __init__(self, decode: Callable[[Any], Any]) -> None:
        self._decode = decode

    def __call__(self, example: Any) -> Any:
        self._decode(with_own_arrays(example))
        return example


@dataclass
class Preparation:
    """The steps between reading an example and the echo stage.

    Attributes:
        decode: deterministic function that decodes one example; None if the source yields decoded examples.
        augment: function that augments many examples before the echo; None if augmentation comes later.
        stacked: whether to stack examples of the same shape into arrays.
        length: function that returns the number of examples in a whole batch; None if the source yields
            single examples.
        alone: whether this runs in a worker process, which keeps examples one by one.
    """

    decode: Callable[[Any], Any] | None = None
    augment: Callable[[keyed.Items, Examples], Examples] | None = None
    stacked: bool = True
    length: Callable[[Any], int] | None = None
    alone: bool = False

    def own(self, example: Any) -> Any:
        """Return a copy of an example that the loader may cache and write into; a whole batch as it is."""
        return with_own_arrays(example) if self.stacked else example

    def examples_in(self, read: Any) -> int:
        """Return the number of examples in one item of the source, which is 1 unless it is a whole batch."""
        if self.length is None:
            return 1
        try:
            return self.length(read if self.decode is None else self.decode(with_own_arrays(read)))
        except Exception:
            return 0  # a bad batch contributes no examples

    def finish(self, serials: Serials, examples: Examples) -> Examples:
        """Augment the examples if augmentation comes before the echo, and stack them if possible."""
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
        """Read, decode and ``finish`` some examples, and collect those that cannot be read or decoded.

        Args:
            serials: serial numbers of the examples, int64 [n].
            end: local number of the first example after them.
            fetch: function that reads the example at a position in ``serials``.
            origin: function that returns the name of the example at a position, for messages.
            world: number of ranks.
            rows: rows of the examples in the source, if known.

        Returns:
            The good examples, with the list of bad ones.
        """
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
                if self.alone:  # pickle sends an error without its traceback, so the text is sent as well
                    error, where = picklable_error(error), traceback.format_exc().rstrip()
                bad.append(BadExample(serial // world, origin(position), error, reason, row, where))
            else:
                positions.append(position)
                good.append(example)
        if bad:
            serials = serials[positions]
        return FreshBlock(serials, self.finish(serials, good), end, bad)


class PrefetchQueue:
    """Queue of fresh examples, which threads can fill before the echo stage needs the examples.

    Args:
        claim, work: the two methods of the reader.
        bad: the list to which bad examples are added.
        index: local number of the first example.
        drawn: function to call for each block whose reading drew random numbers.
        begins: whether the first example is the first one of an iteration.

    Attributes:
        index: local number of the next example.
        examples: number of examples returned so far, including bad ones.
        map: the map that reads. The caller may replace it by one with threads.
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
        """Return examples that the buffers need again.

        Raises:
            Exception: the error of an example that cannot be read now, although it could before.
        """
        self._wanted = count
        chunk = self.map.get()
        assert chunk is not None
        for bad in chunk.bad:
            raise bad.noted(f"while reading {bad.origin} again for the buffer; the first read succeeded")
        return chunk

    def take(self, count: int) -> FreshBlock | None:
        """Return the next ``count`` examples, or the next chunk with threads; None at the iteration's end.

        Raises:
            Exception: the error of a bad example beyond the budget, or if all examples are bad.
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
