"""A DataLoader inside an EchoLoader: its passes as functions of (seed, pass).

What a DataLoader draws depends on when it is iterated and by whom else its generators are used. Here it is
iterated through a copy, whose samplers draw from a generator of their own: the given one stays as it was.
"""

import copy
import random
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    default_collate,
    default_convert,
)

from adaecho.echo.order.sampled import seeds_of_pass
from adaecho.echo.read.access import may_be_shared
from adaecho.echo.threads.seeded_process import global_generators_kept
from adaecho.echo.threads.workers import PoolThread

Position = tuple[int, ...]
"""Of a pass: batches given, and a digest of what they were made of."""


def keyed(source: Any, seed: int) -> Any:
    """A DataLoader as passes that are functions of (seed, pass); anything else as it is.

    One that overrides how it is iterated is a loader of its own kind.
    """
    if not isinstance(source, DataLoader) or type(source).__iter__ is not DataLoader.__iter__:
        return source
    if isinstance(source.dataset, IterableDataset):
        return KeyedDataLoader(source, seed)
    return SeekableDataLoader(source, seed)


class KeyedDataLoader:
    """A DataLoader whose randomness is a function of (seed, pass).

    Its samplers draw from a generator of (seed, pass), as those of ``sampler=`` do; what a dataset draws from
    the global generators of torch, NumPy and ``random`` follows (seed, pass, batch), in worker processes, and
    without them where the caller's thread reads. A pass is not begun before its first batch is asked for.
    """

    kept_open = True  # workers are dear to start

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.__name__ = type(loader).__name__
        self._loader, self._seed, self._number = loader, seed, 0
        self._generator = torch.Generator()
        self._upcoming = _Upcoming()
        self._sampler: Any = None
        self._copied: DataLoader[Any] | None = None
        self.draws = _may_draw(loader)  # from global generators
        # Workers are told of a pass as they begin; but Hugging Face's streams share its number with them.
        hears = hasattr(loader.dataset, "set_epoch")
        self._told_once = hears and not type(loader.dataset).__module__.startswith("datasets.")

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, number: int) -> None:
        """Which pass comes next."""
        self._number = number
        tell_pass(self._loader.dataset, number)

    def __iter__(self) -> "Pass":
        order_seed, seed = seeds_of_pass(self._seed, self._number)
        generator = torch.Generator()
        generator.manual_seed(order_seed)
        if self._sampler is None:  # one copy for all passes: it may count them
            self._sampler = _copied(_indices_of(self._loader), {})
        _prepare(self._sampler, generator, self._number)
        return Pass(self, _Indices(iter(self._sampler), seed, sent=self._loader.num_workers > 0), seed)

    def batches(self, indices: "_Indices", seed: int) -> Iterator[Any]:
        """The batches of these indices. Persistent workers stay from one pass to the next."""
        if self._copied is None or self._told_once:
            self._copied = copy.copy(self._loader)
            of_samples = self._loader.batch_sampler is None
            # Not assigned as attributes, which a DataLoader refuses for some of them.
            vars(self._copied).update(
                {"sampler" if of_samples else "batch_sampler": self._upcoming},
                generator=self._generator,
                in_order=True,  # what comes as it happens to be ready can't come again
                _iterator=None,
            )
        self._upcoming.indices = indices
        self._generator.manual_seed(seed)
        return iter(self._copied)

    def close(self) -> None:
        """Let go of persistent workers."""
        self._copied = None


class SeekableDataLoader(KeyedDataLoader):
    """A DataLoader of a map-style dataset: a pass can begin at any batch, by indices alone."""

    rows_are_known = True  # to be those of before, by a digest

    def iterate_from(self, position: Position) -> "Pass":
        """The pass from a position on.

        Raises:
            ValueError: the batches up to there would be others this time.
        """
        opened = iter(self)
        opened.skip_to(position)
        return opened


class Pass:
    """The batches of one pass.

    Attributes:
        position: just after the last one.
    """

    def __init__(self, loader: KeyedDataLoader, indices: "_Indices", seed: int) -> None:
        self._loader, self._indices, self._seed = loader, indices, seed
        self._batches: Iterator[Any] | None = None
        self.position: Position = 0, 0

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        # A thread of ours must not touch the global generators, which the training step may use meanwhile.
        by_pool_thread = isinstance(threading.current_thread(), PoolThread)
        if self._indices.sent or by_pool_thread or not self._loader.draws:
            batch = self._next()
        else:
            with global_generators_kept():
                _seed_global(self._seed + self.position[0])
                batch = self._next()
        self.position = self.position[0] + 1, self._indices.digest_of_next()
        return batch

    def _next(self) -> Any:
        if self._batches is None:
            self._batches = self._loader.batches(self._indices, self._seed)
        return next(self._batches)

    def skip_to(self, position: Position) -> None:
        """Pass over the batches before a position unread."""
        number = position[0]
        for _ in range(number):
            if next(self._indices, None) is None:
                break
            self.position = self.position[0] + 1, self._indices.digest_of_next()
        if self.position != position:
            raise ValueError(
                f"load_state_dict: the first {number} batches of this {self._loader.__name__} would be "
                "others than when the state was saved: its dataset or batch_size has changed, or its sampler "
                "draws from something that no seed governs; let it draw from a torch.Generator in its "
                "attribute `generator`, or from what set_epoch(pass) told"
            )

    def close(self) -> None:
        """Let go of the workers, unless they are persistent."""
        self._batches = None


class _Upcoming:
    """What stands in for a DataLoader's index sampler: the indices of the pass that is opened next."""

    indices: "_Indices"

    def __iter__(self) -> "_Indices":
        return self.indices


class _Indices:
    """What the batches of a pass are made of, drawn as workers ask for it.

    Args:
        indices: of the sampler.
        seed: of the first batch; those of the others count on.
        sent: they go to worker processes.
    """

    def __init__(self, indices: Iterator[Any], seed: int, *, sent: bool) -> None:
        self.sent = sent
        self._indices, self._seed, self._digest = indices, seed, 0
        self._digests: deque[int] = deque()  # after each that has been drawn, and whose batch hasn't come

    def __iter__(self) -> "_Indices":
        return self

    def __next__(self) -> Any:
        index = next(self._indices)
        self._digest = zlib.crc32(str(index).encode(), self._digest)
        self._digests.append(self._digest)
        seed, self._seed = self._seed, self._seed + 1
        return _Seeding(seed, index) if self.sent else index

    def digest_of_next(self) -> int:
        """The digest of all indices up to those of the next batch to come."""
        return self._digests.popleft()


class _Seeding:
    """An index that seeds the generators of the worker process that unpickles it, just before it is read.

    So what a batch draws depends on no other, however many workers there are and however long they live.
    """

    def __init__(self, seed: int, index: Any) -> None:
        self._seed, self._index = seed, index

    def __reduce__(self) -> Any:
        return _seeded, (self._seed, self._index)


def _seeded(seed: int, index: Any) -> Any:
    _seed_global(seed)
    return index


def _seed_global(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def _may_draw(loader: DataLoader[Any]) -> bool:
    """Whether anything in it but torch's samplers, which have a generator of their own, may draw."""
    of_torch = all(type(sampler).__module__.startswith("torch.") for sampler in _nested(_indices_of(loader)))
    collates = loader.collate_fn not in (default_collate, default_convert)
    return collates or not of_torch or not may_be_shared(loader.dataset)


def _nested(sampler: Any) -> list[Any]:
    """A sampler, and those within it."""
    return [sampler, *(inner for _, within in _samplers_in(sampler) for inner in _nested(within))]


def _indices_of(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _copied(sampler: Any, copies: dict[int, Any]) -> Any:
    """A copy of a sampler, and of the samplers in its attributes, each once."""
    if id(sampler) not in copies:
        try:
            copied = copies[id(sampler)] = copy.copy(sampler)
        except TypeError:  # an iterator, which can be used once
            return sampler
        for name, value in _samplers_in(copied):
            setattr(copied, name, _copied(value, copies))
    return copies[id(sampler)]


def _samplers_in(sampler: Any) -> list[tuple[str, Any]]:
    """The attributes of a sampler that are samplers themselves, which it may draw from."""
    return [
        (name, value)
        for name, value in getattr(sampler, "__dict__", {}).items()
        if isinstance(value, Sampler) or (name in ("sampler", "batch_sampler") and value is not None)
    ]


def _prepare(sampler: Any, generator: torch.Generator, number: int) -> None:
    """Let a copied sampler, and those within it, draw with a generator, and tell them the pass."""
    for _, within in _samplers_in(sampler):
        _prepare(within, generator, number)
    if isinstance(getattr(sampler, "generator", 0), torch.Generator | None):  # not another library's
        sampler.generator = generator
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(number)


def hears_of_passes(source: Any) -> bool:
    """Whether a source, or a part of it, has ``set_epoch``."""
    return any(hasattr(part, "set_epoch") for part in parts_of(source)) or bool(_counting_stages(source))


def tell_pass(source: Any, number: int) -> None:
    """Tell a source which pass comes; one that doesn't hear it, its sampler, batch sampler and dataset."""
    for stage in _counting_stages(source):
        stage.epoch = number - 1
    for part in parts_of(source):
        if hasattr(part, "set_epoch"):
            part.set_epoch(number)
            if part is source:
                return


def key_web_datasets(source: Any, seed: int, rank: int) -> None:
    """Let the shuffles of a webdataset pipeline that follow its ``seed`` follow (seed, rank) instead.

    One that was given none has drawn one as it was made, another in each process.
    """
    key = int(np.random.SeedSequence((abs(seed), rank)).generate_state(1)[0])
    for pipeline in _web_datasets(source):
        drawn = getattr(pipeline, "seed", None)
        for stage in getattr(pipeline, "pipeline", ()) if drawn is not None else ():
            arguments = getattr(stage, "kw", None) or {}
            if getattr(stage, "seed", None) == drawn:  # detshuffle
                stage.seed = key
            elif arguments.get("seed") == drawn:  # shuffle, with its arguments yet to be given
                stage.kw = {**arguments, "seed": key}
        if drawn is not None:
            pipeline.seed = key


def _counting_stages(source: Any) -> list[Any]:
    """Stages of a webdataset pipeline that count its passes by themselves: of ``detshuffle`` and the like.

    They count from the beginning of their process on. Their ``epoch`` is the number of the pass before.
    """
    return [part for part in _web_datasets(source) if type(getattr(part, "epoch", None)) is int]


def _web_datasets(part: Any) -> list[Any]:
    """A webdataset pipeline, its stages and those within them; nothing of what is of another library."""
    if isinstance(part, DataLoader):
        return _web_datasets(part.dataset)
    if not type(part).__module__.startswith("webdataset."):
        return []
    return [part, *(stage for inner in getattr(part, "pipeline", ()) for stage in _web_datasets(inner))]


def parts_of(source: Any) -> list[Any]:
    batch_sampler = getattr(source, "batch_sampler", None)
    named = [getattr(source, name, None) for name in ("dataset", "sampler")]
    parts = [source, *named, batch_sampler, getattr(batch_sampler, "sampler", None)]
    return [part for index, part in enumerate(parts) if all(part is not other for other in parts[:index])]
