"""A DataLoader of torch inside an EchoLoader: its passes as functions of (seed, pass).

What a DataLoader draws depends on when it is iterated and by whom else its generators are used. Here it is
iterated through a copy, whose samplers draw from a generator of their own: the given one stays as it was.
What is assigned to it or to its samplers meanwhile (weights, a batch size) holds from the next pass on.
"""

import copy
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate, default_convert

from adaecho.echo.order.permutation import seeds_of_pass
from adaecho.echo.read.around import IterableSource, Position, tell_pass
from adaecho.echo.read.failures import warn_caller
from adaecho.echo.read.rows import may_be_shared
from adaecho.echo.threads.generators import global_generators_kept, seed_globally
from adaecho.echo.threads.workers import PoolThread


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

    kept_open = True  # workers are dear to start

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader)
        self._loader, self._seed = loader, seed
        self.seekable = self.knows_rows = not isinstance(loader.dataset, IterableDataset)
        self.reordered = True
        self._of_batches = loader.batch_sampler is not None
        self._samplers: dict[int, _Copy] = {}  # of it and of those within it, which may count passes
        self._sampler = _copied(loader.batch_sampler if self._of_batches else loader.sampler, self._samplers)
        self._generator, self._upcoming = torch.Generator(), _Upcoming()
        self._own: DataLoader[Any] | None = None  # a copy
        self.draws = False  # from global generators; both as of the pass that was opened last
        self.sends = False  # indices, to worker processes
        # Workers are told of a pass as they begin; but Hugging Face's streams share its number with them.
        hears = hasattr(loader.dataset, "set_epoch")
        self._told_once = hears and not type(loader.dataset).__module__.startswith("datasets.")

    @property
    def length(self) -> int | None:
        """Batches of a pass, told by a copy that is dropped: to tell, a sampler may draw and keep its own."""
        if not self.seekable:
            return super().length
        try:
            return len(_copied(self._loader.batch_sampler if self._of_batches else self._loader.sampler, {}))
        except (TypeError, RuntimeError):
            return None

    def _may_draw(self) -> bool:
        """Whether anything in it but torch's samplers, which have a generator of their own, may draw."""
        of_torch = all(type(one.copy).__module__.startswith("torch.") for one in self._samplers.values())
        collates = self._loader.collate_fn not in (default_collate, default_convert)
        return collates or not of_torch or not may_be_shared(self._loader.dataset)

    def open_pass(self, number: int, position: Position = ()) -> "Pass":
        """A pass, from a position on: batches given, and a digest of what they were made of.

        Raises:
            ValueError: the batches up to there would be others this time.
        """
        if isinstance(position, dict) or (position and not self.seekable):
            raise self._takes_no_position()
        tell_pass(self._loader.dataset, number)
        order_seed, seed = seeds_of_pass(self._seed, number)
        generator = torch.Generator()
        generator.manual_seed(order_seed)
        for one in list(self._samplers.values()):
            one.follow(self._samplers)
        self.draws, self.sends = self._may_draw(), self._loader.num_workers > 0
        for sampler in [one.copy for one in reversed(self._samplers.values())]:  # the innermost first
            if isinstance(getattr(sampler, "generator", 0), torch.Generator | None):  # not another library's
                sampler.generator = generator
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
        opened = Pass(self, iter(self._sampler), seed)
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
        self._indices = self._drawn(drawn)
        self._digests: deque[int] = deque()  # after each that has been drawn, and whose batch hasn't come
        self._batches: Iterator[Any] | None = None
        self.position = 0, 0

    def _drawn(self, drawn: Iterator[Any]) -> Iterator[Any]:
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
        if self._source.sends or by_pool_thread or not self._source.draws:
            batch = self._next()
        else:
            with global_generators_kept():
                seed = self._seed + self.position[0]
                seed_globally(seed, seed)
                batch = self._next()
        self.position = self.position[0] + 1, self._digests.popleft()
        return batch

    def _next(self) -> Any:
        if self._batches is None:
            self._batches = self._source.batches(self._indices, self._seed)
        return next(self._batches)

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
    seed_globally(seed, seed)
    return index


class _Copy:
    """A sampler, a copy of it, and the attributes that were copied."""

    def __init__(self, original: Any) -> None:
        self._original, self._seen = original, dict[str, Any]()
        self.copy = original
        # A list of rows has no generator, and may be filled otherwise.
        if hasattr(original, "__dict__") or hasattr(original, "__slots__"):
            with suppress(TypeError):  # of an iterator, which can be used once
                self.copy = copy.copy(original)

    def follow(self, copies: dict[int, "_Copy"]) -> None:
        """Give the copy what has been assigned to the original; it keeps what it has assigned to itself."""
        attributes = {} if self.copy is self._original else getattr(self._original, "__dict__", {})
        for name, value in list(attributes.items()):
            if name not in self._seen or self._seen[name] is not value:
                self._seen[name] = value
                within = isinstance(value, Sampler) or (
                    name in ("sampler", "batch_sampler") and value is not None
                )
                vars(self.copy)[name] = _copied(value, copies) if within else value


def _copied(sampler: Any, copies: dict[int, _Copy]) -> Any:
    """A copy of a sampler, and of those in its attributes, which it may draw from; each once."""
    if id(sampler) not in copies:
        copies[id(sampler)] = _Copy(sampler)
        copies[id(sampler)].follow(copies)
    return copies[id(sampler)].copy
