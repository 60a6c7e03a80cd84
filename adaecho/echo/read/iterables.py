"""Sources that wrap iterables, including the data loaders of other libraries."""

import base64
import copy
import inspect
import io
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from adaecho.echo.memory.pytree import duplicate

# Number of examples or batches between two saved positions. Saving another library's position can take as
# long as reading an example.
APART = 16

Position = Sequence[int] | dict[str, Any]
"""A position in an epoch: integers, another library's state as {"own": ...}, or empty if unknown."""


class IterableSource:
    """A source whose examples come from an iterable, which the loader iterates once per epoch."""

    # The iterable may have these optional methods:
    #
    # * ``set_epoch(number)`` is called before each epoch. If a data loader lacks this method, it is called
    #   on the loader's sampler and dataset.
    # * ``set_share(rank, world_size)`` restricts the iterable to the examples of one rank.
    # * ``iterate_from(position)`` returns an iterator that starts at a saved position in an epoch. Each
    #   iterator has an attribute ``position``, a sequence of integers that only the iterable interprets.
    # * ``state_dict`` and ``load_state_dict``, or ``get_state`` and ``set_state``, save and restore a
    #   position.

    thread_safe = True  # because only one thread at a time reads an iterable
    has_order_digest = False
    _remedy = (
        "Seed its random numbers in set_epoch(epoch), e.g. in a class whose __iter__ creates it with "
        "seed=epoch. Or yield examples in their stored order and shuffle with shuffle_buffer=. Instead of a "
        "wrapper around a DataLoader, or a loader with its own state, pass a torch DataLoader with the same "
        "arguments"
    )

    def __init__(self, source: Any) -> None:
        self._source = source  # the iterable, or a function that returns an iterator for each epoch
        self.name = getattr(source, "__name__", type(source).__name__)
        self.seekable = hasattr(source, "iterate_from")  # whether reading can start at any example
        # Whether the order of examples may differ between epochs.
        self.reordered = any(hasattr(part, "set_epoch") for part in parts_of(source))
        self._share: Callable[[], object] = lambda: None
        self._opened: Any = None  # the iterable of the current pass
        self.within = False  # whether the current epoch has begun and not yet ended
        self._methods: PositionMethods | None = None  # the methods for the position in the current pass

    @property
    def length(self) -> int | None:
        """Number of examples or batches in an epoch; None if unknown."""
        try:
            return len(self._source)
        except (TypeError, RuntimeError):  # some sources know their length only after iteration
            return None

    def set_share(self, rank: int, world: int) -> bool:
        """Restrict the source to the examples of this rank; return whether the source supports this."""
        set_share = getattr(self._source, "set_share", None)
        if set_share is not None:
            self._share = partial(set_share, rank, world)
        return set_share is not None

    def open_pass(self, number: int, position: Position = ()) -> Iterator[Any]:
        """Return an iterator over one epoch, from the start or a position that ``position()`` returned.

        Raises:
            ValueError: the source cannot be iterated, cannot start again, or accepts no position.
        """
        self._share()  # repeated for each pass, because another loader around the source may have changed it
        tell_pass(self._source, number)
        methods = position_methods(self._source)
        if position and not isinstance(position, dict):
            if not self.seekable:
                raise self._takes_no_position()
            return self._source.iterate_from(position)  # type: ignore[no-any-return]
        if position and methods is not None:
            _take(methods, position)
        given = self._source if isinstance(self._source, Iterable) else self._source()
        if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
            raise ValueError(
                f"source: {self.name} returned a {type(given).__name__}, which is not iterable; a function "
                "passed as source must return an iterator for each epoch"
            )
        if not position:
            self._check_begins(given)
        self._opened, self.within = given, False
        iterator = iter(given)
        self._methods = methods or position_methods(iterator)
        if position and methods is None:
            if self._methods is None:
                raise self._takes_no_position()
            _take(self._methods, position)
        return iterator

    @property
    def marks_apart(self) -> int:
        """Smallest number of items between two saved positions; 0 if the source has no positions."""
        return 1 if self.seekable else APART if self._methods is not None else 0

    def position(self, iterator: Any) -> Position:
        """Return the position of the current epoch's iterator, or () if the position is unknown."""
        if self.seekable:
            return tuple(operator.index(part) for part in iterator.position)
        return () if self._methods is None else _saved(self._methods)

    def position_after_pass(self) -> Position:
        """Return the position between the completed epoch and the next one, or () if unknown."""
        methods = position_methods(self._source)
        return () if methods is None or self._methods is None else _saved(methods)

    def order_digest(self, iterator: Any) -> int:  # noqa: ARG002 (of an adapter that knows it)
        """Return a digest of the row numbers in the epoch so far, or 0 if they are unknown."""
        return 0

    def let_go(self, iterator: Any) -> None:
        """Close the iterator of an epoch, unless the iterator is the source itself."""
        # A generator that has not yielded yet is not closed, because it could never yield afterwards.
        unread = inspect.isgenerator(iterator) and inspect.getgeneratorstate(iterator) == inspect.GEN_CREATED
        if iterator is not self._source and hasattr(iterator, "close") and not unread:
            iterator.close()

    def close(self) -> None:
        """Close the source if it is an iterator that can be closed."""
        if isinstance(self._source, Iterator) and hasattr(self._source, "close"):
            self._source.close()

    def check_restart(self) -> None:
        """Raise ValueError if the source cannot be read again from the start."""
        given = self._source
        begun = inspect.isgenerator(given) and inspect.getgeneratorstate(given) != inspect.GEN_CREATED
        self._check_begins(given, begun=begun)

    def _check_begins(self, given: Any, *, begun: bool = False) -> None:
        """Raise ValueError if the source is an iterator that would continue an unfinished epoch."""
        # ``iter`` may continue this epoch. With ``set_epoch``, ``iter`` is assumed to start a new one.
        begun |= self.within and given is self._opened and isinstance(given, Iterator)
        if begun and not hasattr(given, "set_epoch"):
            raise ValueError(
                f"source: {self.name} is an iterator, which can be iterated once and has no position. A "
                "second epoch, load_state_dict or a resume after an interrupt restarts it. Pass a "
                "function that returns a new iterator, e.g. lambda: open(path), or an object whose __iter__ "
                "returns one, or iterate once with epochs=1"
            )

    def own_batch(self, batch: Any) -> Any:
        """Return a copy of a batch, because some sources, such as DALI, reuse its memory."""
        with suppress(TypeError):  # objects that cannot be copied are returned as they are
            return duplicate(batch)
        return batch

    def other_example(self, serial: int) -> ValueError:
        """Return the error for an example that differs when it is reread."""
        return ValueError(
            f"load_state_dict: {self.origin(serial)} differs from the example in the saved state: "
            f"{self.name} yields other examples, or another order, when it is iterated again, so some would "
            f"be used too often and others never. {self._remedy}"
        )

    def _takes_no_position(self) -> ValueError:
        return ValueError(
            f"load_state_dict: {self.name} had a position when the state was saved, but now accepts none; "
            "pass the source that the state was saved with"
        )

    def origin(self, serial: int) -> str:
        """Return the name of an example for messages."""
        return f"example {serial} (counted from 0 over all passes) of {self.name}"


def parts_of(source: Any) -> list[Any]:
    """Return a source, its dataset and its samplers, each object once."""
    batch_sampler = getattr(source, "batch_sampler", None)
    named = [getattr(source, name, None) for name in ("dataset", "sampler")]
    parts = [source, *named, batch_sampler, getattr(batch_sampler, "sampler", None)]
    return list({id(part): part for part in parts}.values())


def tell_pass(source: Any, number: int) -> None:
    """Call ``set_epoch(number)`` on a source, or else on its sampler, batch sampler and dataset."""
    for part in [source] if hasattr(source, "set_epoch") else parts_of(source):
        if hasattr(part, "set_epoch"):
            part.set_epoch(number)


PositionMethods = tuple[Callable[[], Any], Callable[[Any], Any]]
"""A function that returns a position, and a function that restores it."""


def _saved(methods: PositionMethods) -> Position:
    return {"own": copy.deepcopy(methods[0]())}  # copied, because the source may write into it later


def _take(methods: PositionMethods, position: Any) -> None:
    methods[1](copy.deepcopy(position["own"]))


def encoded(state: Any) -> str:
    """Encode the state of another library's loader as text."""
    file = io.BytesIO()
    torch.save(state, file)
    return base64.b64encode(file.getvalue()).decode()


def decoded(text: str) -> Any:
    """Decode text from ``encoded``. No code from the text is executed."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


def position_methods(owner: Any) -> PositionMethods | None:
    """Return an object's methods that save and restore its position, or None if it has none."""
    # The states of Hugging Face streams lack the buffer of ``shuffle``, so a resumed stream would yield
    # different data.
    streams = [owner, getattr(owner, "dataset", None), getattr(owner, "_dataset", None)]
    if any(kind.__module__.startswith("datasets.") for part in streams for kind in type(part).__mro__):
        return None
    # Accelerate's loaders always have these methods, but with use_stateful_dataloader=False they do not work.
    for ask, give in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(owner, ask) and hasattr(owner, give) and getattr(owner, "use_stateful_dataloader", True):
            return getattr(owner, ask), getattr(owner, give)
    return None
