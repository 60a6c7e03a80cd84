"""Adapter that makes each epoch over a torch DataLoader reproducible."""

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
from adaecho.echo.read.iterables import IterableSource, Position, tell_pass
from adaecho.echo.threads import PoolThread


def is_keyed(source: Any) -> bool:
    """Return whether ``DataLoaderSource`` can wrap an object: a DataLoader with the original ``__iter__``."""
    return isinstance(source, DataLoader) and type(source).__iter__ is DataLoader.__iter__


class DataLoaderSource(IterableSource):
    """A source that wraps a DataLoader, and makes each epoch reproducible from a seed.

    The source seeds the samplers for each epoch, and the global generators of torch, NumPy and ``random`` for
    each batch. If the dataset is map-style, reading can start at any batch of an epoch.
    """

    _remedy = (
        "Its sampler draws random numbers without a seed; set its attribute `generator` to a "
        "torch.Generator, or seed it in set_epoch(epoch). An IterableDataset must draw from the global "
        "generators, in workers of the DataLoader or with num_workers=0 in the EchoLoader"
    )

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader)
        self._loader, self._seed = loader, seed
        self.seekable = self.has_order_digest = not isinstance(loader.dataset, IterableDataset)
        self.reordered = True
        self._of_batches = loader.batch_sampler is not None
        self._sampler: Any = loader.batch_sampler if self._of_batches else loader.sampler
        self.reads_in_workers = loader.num_workers > 0
        self._generator, self._upcoming = torch.Generator(), _Upcoming()
        self._own: DataLoader[Any] | None = None  # a copy of the DataLoader that uses the seeded indices

    def own_batch(self, batch: Any) -> Any:
        """Copy a batch, unless the DataLoader has already put it into new memory."""
        return batch if self._of_batches or self.reads_in_workers else super().own_batch(batch)

    def open_pass(self, number: int, position: Position = ()) -> "Pass":
        """Return an iterator over the batches of one epoch, from the start or a saved position."""
        # A position is a saved ``Pass.position``, or empty for the start of the epoch.
        if isinstance(position, dict) or (position and not self.seekable):
            raise self._takes_no_position()
        tell_pass(self._loader.dataset, number)
        order_seed, seed = seeds_of_pass(self._seed, number)
        samplers = _within(self._sampler)
        for sampler in reversed(samplers):  # the innermost sampler first
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
        generator = torch.Generator()
        generator.manual_seed(order_seed)
        opened = Pass(self, _drawn(self._sampler, samplers, generator), seed)
        if position:
            opened.skip_to(position)
        return opened

    def order_digest(self, iterator: Any) -> int:
        """Return a digest of the dataset indices in the epoch so far, or 0 if they are unknown."""
        return int(iterator.position[1]) if self.has_order_digest else 0

    def batches(self, indices: Iterator[Any], seed: int) -> Iterator[Any]:
        """Return an iterator that loads the batches with the given dataset indices."""
        # Persistent workers would not see an epoch that is set after their start.
        kept = None if hasattr(self._loader.dataset, "set_epoch") else self._own
        own = copy.copy(self._loader) if kept is None else kept
        # A DataLoader rejects assignments to some of its attributes, so update its dict, in one statement
        # that no interrupt can split.
        vars(own).update(
            vars(self._loader)
            | {
                "batch_sampler" if self._of_batches else "sampler": self._upcoming,
                "generator": self._generator,
                "in_order": True,  # otherwise the order of batches would not be reproducible
                "_iterator": None if kept is None else kept._iterator,
            }
        )
        self._own = own
        self._upcoming.indices = indices
        self._generator.manual_seed(seed)
        return iter(self._own)

    def close(self) -> None:
        """Drop the copy of the DataLoader, which ends its persistent workers."""
        self._own = None


def _within(sampler: Any) -> list[Any]:
    """Return a sampler and all samplers nested in it, outermost first."""
    found = [sampler]
    for one in found:
        for name, value in getattr(one, "__dict__", {}).items():
            inner = isinstance(value, Sampler) or (name in ("sampler", "batch_sampler") and value is not None)
            if inner and not any(value is known for known in found):
                found.append(value)
    return found


def _drawn(sampler: Any, samplers: list[Any], generator: torch.Generator) -> Iterator[Any]:
    """Iterate over a sampler. During each draw, ``generator`` replaces the generators of ``samplers``."""
    # The type is checked, because samplers of other libraries may use the name for something else.
    drawing = [one for one in samplers if isinstance(getattr(one, "generator", 0), torch.Generator | None)]
    iterator: Iterator[Any] | None = None
    while True:
        # The samplers belong to the user, so their generators are restored after each draw.
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
    """Iterator over the batches of one epoch of a DataLoader.

    Args:
        indices: yields the dataset indices of each batch.
        seed: seed of the first batch. Batch i, counted from 0, uses ``seed + i``.

    Attributes:
        position: number of batches received so far, and a digest of their dataset indices.
    """

    def __init__(self, source: DataLoaderSource, indices: Iterator[Any], seed: int) -> None:
        self._source, self._seed = source, seed
        self._indices = self._digested(indices)
        self._digests: deque[int] = deque()  # one for each batch that is drawn but not received
        self._batches: Iterator[Any] | None = None
        self.position = 0, 0

    def _digested(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield the indices of each batch, and record a digest of all indices so far."""
        digest = 0
        for number, index in enumerate(indices):
            digest = zlib.crc32(str(index).encode(), digest)
            self._digests.append(digest)
            yield _Seeding(self._seed + number, index) if self._source.reads_in_workers else index

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        # A loader thread must not change the global generators, because the training step may be using them.
        by_pool_thread = isinstance(threading.current_thread(), PoolThread)
        seeded = not (self._source.reads_in_workers or by_pool_thread)
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
        """Skip the batches before a saved position, or raise ValueError if their indices have changed."""
        number = position[0]
        for _ in islice(self._indices, number):
            self.position = self.position[0] + 1, self._digests.popleft()
        if self.position != tuple(position):
            raise ValueError(
                f"load_state_dict: the first {number} batches of this {self._source.name} would differ from "
                f"the saved ones. If its dataset and batch_size are unchanged: {self._source._remedy}"
            )

    def close(self) -> None:
        """Drop the iterator over batches, which ends the workers unless they are persistent."""
        self._batches = None


class _Upcoming:
    """A sampler that yields prepared indices, in place of the user's sampler."""

    indices: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class _Seeding:
    """Dataset indices of a batch, which seed a worker's global generators when they are unpickled."""

    def __init__(self, seed: int, index: Any) -> None:
        self._seed, self._index = seed, index

    def __reduce__(self) -> Any:
        return _seeded, (self._seed, self._index)


def _seeded(seed: int, index: Any) -> Any:
    keyed.seed_globally(seed, seed)
    return index
