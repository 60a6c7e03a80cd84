"""Sources that can only be iterated, others' loaders among them; who reads rows never meets them.

Here is what anything that can only be iterated needs: how it is told of passes, and what it may do with its
memory. A DataLoader of torch has an adapter of its own.
"""

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

APART = 16  # examples or batches between two questions: to tell one may take as long as to read an example

Position = Sequence[int] | dict[str, Any]
"""Of a pass: whole numbers, or what a source tells in a form of its own as {"own": ...}; empty for none."""


class IterableSource:
    """Examples one after another; a pass is one iteration.

    Args:
        source: an iterable that can be iterated again for the next pass, or a factory of iterators. It may
            have ``set_epoch(number)``, called before each pass, or a sampler or dataset that has it;
            ``set_share(rank, world_size)``, after which it gives that rank's examples alone; and
            ``iterate_from(position)``, which begins at what the ``position`` of an earlier iterator was, a
            sequence of whole numbers: for a state, and after an iterator was closed before its end. What
            tells and takes its own position is asked for it (``position_methods``): a StatefulDataLoader,
            Grain's iterators and an EchoLoader do.

    Attributes:
        name: of the source, for messages.
        seekable: it begins anywhere, by ``iterate_from``.
        reordered: passes may differ in their order.
        within: it has been read from, and has not come to its end; the reader tells.
    """

    thread_safe = True  # one thread at a time reads it
    knows_rows = False  # but not what they hold

    def __init__(self, source: Any) -> None:
        self._source = source
        self.name = getattr(source, "__name__", type(source).__name__)
        self.seekable = hasattr(source, "iterate_from")
        self.reordered = any(hasattr(part, "set_epoch") for part in parts_of(source))
        self._share: Callable[[], object] = lambda: None
        self._opened: Any = None  # what is its own iterator, and was opened last
        self.within = False
        self._methods: PositionMethods | None = None  # of the iterator opened last

    @property
    def length(self) -> int | None:
        """Examples (or whole batches) of a pass, where the source tells."""
        try:
            return len(self._source)
        except (TypeError, RuntimeError):  # the latter of one that knows it once it is iterated
            return None

    def set_share(self, rank: int, world: int) -> bool:
        """Whether the source gives one rank's examples alone, from here on in each pass."""
        set_share = getattr(self._source, "set_share", None)
        if set_share is not None:
            self._share = partial(set_share, rank, world)
        return set_share is not None

    def open_pass(self, number: int, position: Position = ()) -> Iterator[Any]:
        """The iterator of one pass, from somewhere within it."""
        self._share()  # another loader around the same source may have told it its own
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
                f"source: {self.name} returned a {type(given).__name__}, which can't be iterated; a function "
                "given as a source returns an iterator for each pass"
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
        """Examples (or whole batches) between two positions asked for, at least; 0 where none is told."""
        return 1 if self.seekable else APART if self._methods is not None else 0

    def position(self, iterator: Any) -> Position:
        """Where the iterator that was opened last is; () where that can't be told."""
        if self.seekable:
            return tuple(operator.index(part) for part in iterator.position)
        return () if self._methods is None else _told(self._methods)

    def position_after_pass(self) -> Position:
        """Where the next pass begins, of a source that tells it by itself; () of others."""
        methods = position_methods(self._source)
        return () if methods is None or self._methods is None else _told(methods)

    def rows(self, iterator: Any) -> int:  # noqa: ARG002 (of an adapter that knows them)
        """A digest of which rows the iterator has given so far; 0 where that isn't known."""
        return 0

    def let_go(self, iterator: Any) -> None:
        """Close an iterator of a pass; what is its own iterator may begin again, and stays open."""
        # A generator of which nothing has been asked could not be read any more.
        unread = inspect.isgenerator(iterator) and inspect.getgeneratorstate(iterator) == inspect.GEN_CREATED
        if iterator is not self._source and hasattr(iterator, "close") and not unread:
            iterator.close()

    def close(self) -> None:
        """Let go of what stays from one pass to the next."""
        if isinstance(self._source, Iterator) and hasattr(self._source, "close"):
            self._source.close()

    def check_restart(self) -> None:
        """Raises ValueError where what was read can't be read again, and would be passed over silently."""
        given = self._source
        begun = inspect.isgenerator(given) and inspect.getgeneratorstate(given) != inspect.GEN_CREATED
        self._check_begins(given, begun=begun)

    def _check_begins(self, given: Any, *, begun: bool = False) -> None:
        """Raises ValueError for what is its own iterator, and has been left in the middle of a pass.

        Whether ``iter`` begins it again can't be seen from outside, unless it was told the pass.
        """
        begun |= self.within and given is self._opened and isinstance(given, Iterator)
        if begun and not hasattr(given, "set_epoch"):
            raise ValueError(
                f"source: {self.name} is an iterator, which can be iterated once and tells no position, so "
                "that it can't begin again, as a further pass, load_state_dict and going on after an "
                "interruption need; give a function that returns a new one, such as lambda: open(path), or "
                "an object whose __iter__ does, or iterate once with epochs=1"
            )

    def own_batch(self, batch: Any) -> Any:
        """A whole batch as the loader may keep it: a source may use its memory again, as FFCV and DALI do."""
        with suppress(TypeError):  # of what can't be copied
            return duplicate(batch)
        return batch

    def check_other(self, serial: int, *, same_rows: bool) -> None:  # noqa: ARG002 (as above)
        """Raises ValueError: an example which was read again is another one than before.

        Others come, or in another order. What a dataset draws can't be told from that.
        """
        raise self._others(
            serial,
            "Let all that it draws follow what set_epoch(pass) told it, as a class around it can that makes "
            "it anew in __iter__ with seed=pass, or let it give examples in their stored order, and shuffle "
            "here: shuffle_buffer=. In place of what wraps a DataLoader, or keeps its state, give a "
            "DataLoader of torch with the same arguments",
        )

    def _others(self, serial: int, remedy: str) -> ValueError:
        return ValueError(
            f"load_state_dict: {self.origin(serial)} is another one than when the state was saved: "
            f"{self.name} gives other examples, or in another order, when it is iterated again, so that some "
            f"would be used too often and others never. {remedy}"
        )

    def _takes_no_position(self) -> ValueError:
        return ValueError(
            f"load_state_dict: {self.name} told its own position when the state was saved, and takes none "
            "now; give the source it was saved with"
        )

    def origin(self, serial: int) -> str:
        """What to call an example in a message."""
        return f"example {serial} (counted from 0 over all passes) of {self.name}"


def parts_of(source: Any) -> list[Any]:
    """A source, its dataset and its samplers, each once: what may have ``set_epoch``, or share out."""
    batch_sampler = getattr(source, "batch_sampler", None)
    named = [getattr(source, name, None) for name in ("dataset", "sampler")]
    parts = [source, *named, batch_sampler, getattr(batch_sampler, "sampler", None)]
    return list({id(part): part for part in parts}.values())


def tell_pass(source: Any, number: int) -> None:
    """Tell a source which pass comes; one that doesn't hear it, its sampler, batch sampler and dataset."""
    for part in [source] if hasattr(source, "set_epoch") else parts_of(source):
        if hasattr(part, "set_epoch"):
            part.set_epoch(number)


PositionMethods = tuple[Callable[[], Any], Callable[[Any], Any]]
"""What tells a position, and what takes it again."""


def _told(methods: PositionMethods) -> Position:
    return {"own": copy.deepcopy(methods[0]())}  # as it may go on in the one it told


def _take(methods: PositionMethods, position: Any) -> None:
    methods[1](copy.deepcopy(position["own"]))


def encoded(state: Any) -> str:
    """Encode a third-party state as text."""
    file = io.BytesIO()
    torch.save(state, file)
    return base64.b64encode(file.getvalue()).decode()


def decoded(text: str) -> Any:
    """Decode a third-party state; no code from it runs."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


def position_methods(owner: Any) -> PositionMethods | None:
    """How an object tells and takes its own position, if it does.

    A stream of Hugging Face's ``datasets`` is not asked, nor a loader of one: with ``shuffle`` its state
    leaves out what its buffer held, and other examples would follow.
    """
    streams = [owner, getattr(owner, "dataset", None), getattr(owner, "_dataset", None)]
    if any(kind.__module__.startswith("datasets.") for part in streams for kind in type(part).__mro__):
        return None
    for ask, give in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(owner, ask) and hasattr(owner, give) and getattr(owner, "use_stateful_dataloader", True):
            return getattr(owner, ask), getattr(owner, give)
    return None  # also of Accelerate's loaders around what has no state
