"""A DataLoader of torch inside an EchoLoader: its passes as functions of (seed, pass).

What a DataLoader draws depends on when it is iterated and by whom else its generators are used. Here its
samplers draw from a generator of (seed, pass), which they have while they draw, and what its dataset draws is
seeded for each batch.
"""

import copy
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from adaecho.echo.order import keyed
from adaecho.echo.order.permutation import seeds_of_pass
from adaecho.echo.read.chunks import warn_caller
from adaecho.echo.read.iterables import IterableSource, Position, tell_pass
from adaecho.echo.threads import PoolThread


def is_keyed(source: Any) -> bool:
    """Whether it is a DataLoader to be keyed: one that overrides how it is iterated is of its own kind."""
    return isinstance(source, DataLoader) and type(source).__iter__ is DataLoader.__iter__


class DataLoaderSource(IterableSource):
    """A DataLoader whose randomness is a function of (seed, pass).

    Its samplers draw from a generator of (seed, pass), as those of ``sampler=`` do; what a dataset draws from
    the global generators of torch, NumPy and ``random`` follows (seed, pass, batch), in worker processes, and
    without them where the caller's thread reads. A pass is not begun before its first batch is asked for. Of
    a map-style dataset it can begin at any batch, by indices alone.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader)
        self._loader, self._seed = loader, seed
        self.seekable = self.knows_rows = not isinstance(loader.dataset, IterableDataset)
        self.reordered = True
        self._of_batches = loader.batch_sampler is not None
        self._generator, self._upcoming = torch.Generator(), _Upcoming()
        self._own: DataLoader[Any] | None = None  # a copy, with the indices that are drawn here
        # Workers are told of a pass as they begin; but Hugging Face's streams share its number with them.
        hears = hasattr(loader.dataset, "set_epoch")
        self._told_once = hears and not type(loader.dataset).__module__.startswith("datasets.")

    @property
    def _sampler(self) -> Any:
        """What gives the indices of each batch, or without batches of each example."""
        return self._loader.batch_sampler if self._of_batches else self._loader.sampler

    @property
    def sends(self) -> bool:
        """Whether its workers are processes."""
        return self._loader.num_workers > 0

    @property
    def length(self) -> int | None:
        """Batches of a pass, told by a copy that is dropped: to tell, a sampler may draw and keep its own."""
        if not self.seekable:
            return super().length
        try:
            with keyed.global_generators_kept():
                return len(copy.copy(self._sampler))
        except (TypeError, RuntimeError):
            return None

    def own_batch(self, batch: Any) -> Any:
        """What was collated, or came from another process, lies in memory of its own."""
        return batch if self._of_batches or self.sends else super().own_batch(batch)

    def open_pass(self, number: int, position: Position = ()) -> "Pass":
        """A pass, from a position on: batches given, and a digest of what they were made of.

        Raises:
            ValueError: the batches up to there would be others this time.
        """
        if isinstance(position, dict) or (position and not self.seekable):
            raise self._takes_no_position()
        tell_pass(self._loader.dataset, number)
        order_seed, seed = seeds_of_pass(self._seed, number)
        samplers = _within(self._sampler)
        for sampler in reversed(samplers):  # the innermost first
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
        generator = torch.Generator()
        generator.manual_seed(order_seed)
        opened = Pass(self, _drawn(self._sampler, samplers, generator), seed)
        if position:
            opened.skip_to(position)
        return opened

    def rows(self, iterator: Any) -> int:
        """A digest of the indices of all batches that the pass has given so far."""
        return int(iterator.position[1]) if self.knows_rows else 0

    def check_other(self, serial: int, *, same_rows: bool) -> None:
        """Warn where the rows are the same, and their contents others; otherwise raises ValueError."""
        if not same_rows:
            raise self._others(serial, _REMEDY)
        told = "of the same rows" if self.knows_rows else "so examples may be missing or repeated"
        warn_caller(
            f"load_state_dict: {self.origin(serial)} has other contents than before, {told}: its "
            "dataset draws, from a generator of its own, or in a thread of this loader's, which must not "
            "seed the global ones; let it draw from the global generators, and give the DataLoader "
            "num_workers=1, which draws in a process, or the EchoLoader num_workers=0"
        )

    def batches(self, indices: Iterator[Any], seed: int) -> Iterator[Any]:
        """The batches of these indices. Persistent workers stay from one pass to the next."""
        kept = None if self._told_once else self._own
        own = copy.copy(self._loader) if kept is None else kept
        # Not assigned as attributes, which a DataLoader refuses for some of them, and all at once, as an
        # interrupt may fall between.
        vars(own).update(
            vars(self._loader)
            | {
                "batch_sampler" if self._of_batches else "sampler": self._upcoming,
                "generator": self._generator,
                "in_order": True,  # what comes as it happens to be ready can't come again
                "_iterator": None if kept is None else kept._iterator,
            }
        )
        self._own = own
        self._upcoming.indices = indices
        self._generator.manual_seed(seed)
        return iter(self._own)

    def close(self) -> None:
        """Let go of persistent workers."""
        self._own = None


_REMEDY = (
    "Its sampler draws from something that no seed governs; let it draw from a torch.Generator in its "
    "attribute `generator`, or from what set_epoch(pass) told"
)


def _within(sampler: Any) -> list[Any]:
    """A sampler and those in its attributes, from which it may draw; each once."""
    found = [sampler]
    for one in found:
        for name, value in getattr(one, "__dict__", {}).items():
            inner = isinstance(value, Sampler) or (name in ("sampler", "batch_sampler") and value is not None)
            if inner and not any(value is known for known in found):
                found.append(value)
    return found


def _drawn(sampler: Any, samplers: list[Any], generator: torch.Generator) -> Iterator[Any]:
    """What a sampler gives, drawn from a generator that the samplers have only while one is asked."""
    # Of torch's generators: an attribute of this name may be something else in another library.
    drawing = [one for one in samplers if isinstance(getattr(one, "generator", 0), torch.Generator | None)]
    iterator: Iterator[Any] | None = None
    while True:
        given = [one.generator for one in drawing]
        try:
            for one in drawing:
                one.generator = generator
            iterator = iter(sampler) if iterator is None else iterator
            index = next(iterator)
        except StopIteration:
            return
        finally:
            for one, own in zip(drawing, given, strict=True):
                one.generator = own
        yield index


class Pass:
    """The batches of one pass.

    Args:
        source: whose pass it is.
        drawn: of its sampler: what each batch is made of.
        seed: of the first batch; those of the others count on.

    Attributes:
        position: just after the last one: batches given, and a digest of all that they were made of.
    """

    def __init__(self, source: DataLoaderSource, drawn: Iterator[Any], seed: int) -> None:
        self._source, self._seed = source, seed
        self._indices = self._digested(drawn)
        self._digests: deque[int] = deque()  # after each that has been drawn, and whose batch hasn't come
        self._batches: Iterator[Any] | None = None
        self.position = 0, 0

    def _digested(self, drawn: Iterator[Any]) -> Iterator[Any]:
        """What the batches are made of, as workers ask for it."""
        digest = 0
        for number, index in enumerate(drawn):
            digest = zlib.crc32(str(index).encode(), digest)
            self._digests.append(digest)
            yield _Seeding(self._seed + number, index) if self._source.sends else index

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        # A thread of ours must not touch the global generators, which the training step may use meanwhile.
        by_pool_thread = isinstance(threading.current_thread(), PoolThread)
        seeded = not (self._source.sends or by_pool_thread)
        with keyed.global_generators_kept() if seeded else nullcontext():
            if seeded:
                seed = self._seed + self.position[0]
                keyed.seed_globally(seed, seed)
            if self._batches is None:
                self._batches = self._source.batches(self._indices, self._seed)
            batch = next(self._batches)
        self.position = self.position[0] + 1, self._digests.popleft()
        return batch

    def skip_to(self, position: Any) -> None:
        """Pass over the batches before a position unread."""
        number = position[0]
        for _ in islice(self._indices, number):
            self.position = self.position[0] + 1, self._digests.popleft()
        if self.position != tuple(position):
            raise ValueError(
                f"load_state_dict: the first {number} batches of this {self._source.name} would be others "
                f"than when the state was saved: its dataset or batch_size has changed, or else: {_REMEDY}"
            )

    def close(self) -> None:
        """Let go of the workers, unless they are persistent."""
        self._batches = None


class _Upcoming:
    """What stands in for a DataLoader's index sampler: the indices of the pass that is opened next."""

    indices: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class _Seeding:
    """An index that seeds the generators of the worker process that unpickles it, just before it is read.

    So what a batch draws depends on no other, however many workers there are and however long they live.
    """

    def __init__(self, seed: int, index: Any) -> None:
        self._seed, self._index = seed, index

    def __reduce__(self) -> Any:
        return _seeded, (self._seed, self._index)


def _seeded(seed: int, index: Any) -> Any:
    keyed.seed_globally(seed, seed)
    return index
