"""Check and call the functions that the user passes to a loader."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from adaecho.echo.memory.pool import Examples, singles_of
from adaecho.echo.memory.pytree import UNFIT, Columns, stack
from adaecho.echo.order import keyed
from adaecho.echo.read.chunks import NONE_SKIPPED, Preparation, Tried
from adaecho.echo.settings import Settings, one_of, refuse, refuse_with_whole_batches
from adaecho.echo.variants import BUFFER_FORMATS

Origin = Callable[[int], str]  # maps the number of an example in reading order to its name in messages
Augment = Callable[[keyed.Items, Examples], Examples]
"""A function of items and their examples that returns as many augmented examples."""

# Makes the seed of the first of two augmentations differ from that of the second.
_ONCE = 0x6F6E63655F666F72


class Augmentation:
    """Calls the user's ``augment`` function, with reproducible random numbers for each use of an example."""

    def __init__(self, augment: Any, seed: int, origin: Origin = "example {}".format) -> None:
        self._augment, self._seed, self._origin = augment, seed, origin
        # ``augment.block(arrays, keys)`` augments n examples in one call. ``arrays`` has the structure of an
        # example, but each array has an additional first axis of length n. ``keys``, uint64 [n], contains one
        # key for each example, from which ``order.keyed`` computes random numbers.
        self._block = getattr(augment, "block", None)
        self._by_name, self._num_arguments = (
            (False, 0) if self._block is not None else arguments_of(augment, "augment")
        )
        # ``augment(example)`` draws from the global generators of torch, NumPy and ``random``. The loader
        # seeds and restores these, unless the function declares ``thread_safe = True``.
        self._seeds = self._num_arguments == 1 and not says_thread_safe(augment)

    def __call__(self, items: keyed.Items, examples: Examples) -> Examples:
        """Augment examples; ``items`` contains the number and repeat index of each example."""
        drawn = keyed.item_keys(self._seed, items)
        if self._block is not None:
            try:
                return _in_block(self._block, drawn, examples)
            except Exception as error:
                error.add_note(f"while augmenting {span(items, self._origin)}")
                raise
        with keyed.global_generators_kept() if self._seeds else nullcontext():
            given = zip(singles_of(examples), drawn.tolist(), strict=True)
            return call_each(self._drawn, given, items, self._origin, "while augmenting {}")

    def _drawn(self, example: Any, key: int) -> Any:
        if self._num_arguments == 2:
            rng = keyed.generator(key)
            return self._augment(example, rng=rng) if self._by_name else self._augment(example, rng)
        if self._seeds:
            keyed.seed_globally(key, key >> 1)
        return self._augment(example)


def _in_block(block: Callable[[Any, keyed.Keys], Any], drawn: keyed.Keys, examples: Examples) -> Columns:
    if isinstance(examples, Columns):
        return examples.with_tree(block(examples.tree(), drawn))
    stacked = stack(examples)
    if stacked is None:
        raise ValueError(
            f"augment.block needs numeric examples of equal shape; {UNFIT}, or pass an "
            "augment(example, rng) without block"
        )
    return stacked.with_tree(block(stacked.tree(), drawn))


def says_thread_safe(function: Any) -> bool:
    """Return whether several threads may call a user's function at the same time."""
    owner = getattr(function, "__self__", None)
    return hasattr(function, "block") or any(getattr(one, "thread_safe", False) for one in (function, owner))


def augmentations(augment: Any, seed: int, origin: Origin) -> list[Augmentation]:
    """Return the user's augmentations as a list: none, one, or the two of a pair ``(once, each_time)``."""
    if isinstance(augment, tuple) and len(augment) != 2:
        raise ValueError(f"augment: expected a tuple (once, each_time), got {len(augment)} parts")
    if isinstance(augment, tuple):
        once, each_time = augment
        return [Augmentation(once, seed ^ _ONCE, origin), Augmentation(each_time, seed, origin)]
    return [] if augment is None else [Augmentation(augment, seed, origin)]


def in_turn(augments: Sequence[Augment]) -> Augment | None:
    """Combine augmentations into one that applies them in order; None if there are none."""

    def augmented(items: keyed.Items, examples: Examples) -> Examples:
        for augment in augments:
            examples = augment(items, examples)
        return examples

    return augmented if augments else None


def decoding_first(decode: Callable[[Any], Any], origin: Origin) -> Augment:
    """Wrap ``decode`` as an augmentation, for a buffer that stores encoded examples."""
    note = f"while decoding {{}}; {NONE_SKIPPED}"
    return lambda items, examples: call_each(decode, zip(singles_of(examples)), items, origin, note)


def call_each(
    function: Callable[..., Any], calls: Iterable[Any], items: keyed.Items, origin: Origin, note: str
) -> list[Any]:
    """Call a function for each example. If a call fails, add the example's name to the error."""
    made: list[Any] = []
    try:
        for arguments in calls:
            made.append(function(*arguments))
    except Exception as error:
        error.add_note(note.format(origin(int(items[len(made)]) >> keyed.ECHO_BITS)))
        raise
    return made


def span(items: keyed.Items, origin: Origin) -> str:
    """Describe examples in an error message, such as "32 examples, from A to B"."""
    first, last = origin(int(items[0]) >> keyed.ECHO_BITS), origin(int(items[-1]) >> keyed.ECHO_BITS)
    return first if len(items) == 1 else f"{len(items)} examples, from {first} to {last}"


def arguments_of(function: Callable[..., Any], name: str) -> tuple[bool, int]:
    """Determine whether and how a user's function accepts a random generator.

    Returns:
        Whether to pass the generator as ``rng=``, and the number of arguments: 2 with a generator, else 1.
    """
    if not callable(function):
        pair = "; pass two parts as a tuple (once, each_time)" * isinstance(function, list)
        raise ValueError(f"{name}: a {type(function).__name__} is not callable and has no block{pair}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return False, 1  # a C function without a signature
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in kinds]
    required = [p for p in positional if p.default is p.empty]
    if len(required) > 2:
        raise ValueError(f"{name}: takes {len(required)} arguments; must be {name}(example, rng)")
    named_rng = any(p.name == "rng" for p in parameters)
    by_name = named_rng and [p.name for p in positional[1:2]] != ["rng"]
    return by_name, 2 if len(required) == 2 or named_rng else 1


@dataclass(frozen=True)
class Functions:
    """The functions that the user passes to a loader, such as ``decode``, ``augment`` and ``collate``."""

    decode: Callable[[Any], Any] | None
    augment: Any  # a function, an object with a method ``block``, or a pair of these
    collate: Callable[[list[Any]], Any] | None
    batch_length: Callable[[Any], int] | None
    settings: Settings
    buffer_format: str  # whether the shuffle buffer stores examples "encoded" or "decoded", or "auto"

    def __post_init__(self) -> None:
        for name in ("decode", "collate", "batch_length"):
            given = getattr(self, name)
            refuse(
                given is not None and not callable(given),
                f"{name}={given!r:.80}: must be a function, got {type(given).__name__}",
            )
        one_of("buffer_format", self.buffer_format, BUFFER_FORMATS)
        whole = self.settings.batch_size is None
        for name in ("augment", "collate"):
            if whole and getattr(self, name) is not None:
                refuse_with_whole_batches(name)
        refuse(
            self.buffer_format == "encoded"
            and (self.decode is None or whole or self._augments_before_buffer),
            f"buffer_format='encoded' with echo={self.settings.echo!r}: the buffer holds encoded examples "
            "only with decode=, batch_size= and no augmentation before the echo; leave out buffer_format",
        )

    @property
    def _augments_before_buffer(self) -> bool:
        """Whether the augmentation, or the first of a pair, runs before the shuffle buffer."""
        variant = self.settings.variant
        return variant.augments_before or (variant.repeats == "examples" and isinstance(self.augment, tuple))

    @property
    def _encoded_in_buffer(self) -> bool:
        """Whether the shuffle buffer stores encoded examples. With "auto", no example is decoded twice."""
        settings = self.settings
        if self.decode is None or settings.batch_size is None or self._augments_before_buffer:
            return False
        if self.buffer_format != "auto":
            return self.buffer_format == "encoded"
        return settings.variant.batches_upstream and not settings.max_bad_examples

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may call ``decode`` and ``augment`` at the same time."""
        parts = self.augment if isinstance(self.augment, tuple) else (self.augment,)
        return all(part is None or says_thread_safe(part) for part in (self.decode, *parts))

    def split_at_buffer(self, origin: Origin) -> tuple[Preparation, Augment | None]:
        """Return how to prepare examples for the shuffle buffer, and how to augment them after it."""
        settings = self.settings
        parts = augmentations(self.augment, settings.seed, origin)
        # The first ``cut`` augmentations run before the echo. For a pair (once, each_time) this is ``once``.
        cut = len(parts) if settings.variant.augments_before else len(parts) - 1
        cut = max(cut, 0) if settings.variant.repeats == "examples" else 0
        before, after = in_turn(parts[:cut]), in_turn(parts[cut:])
        if self.decode is None or not self._encoded_in_buffer:
            return Preparation(self.decode, before), after
        # The loader can skip a bad example only before the buffer, so it decodes each one there as a test.
        tried = Tried(self.decode) if settings.max_bad_examples else None
        for_augment = getattr(self.decode, "for_augment", None)
        first = self.augment[0] if isinstance(self.augment, tuple) else self.augment
        decode = self.decode if for_augment is None else for_augment(first)
        return Preparation(tried, before), in_turn([decoding_first(decode, origin), *parts[cut:]])
