"""The user's functions: their checks, and the side of the buffer on which each runs.

Augmentation is keyed to (seed, fresh serial, echo index). It is vectorised or handles one example at a time.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from adaecho.echo.memory.pool import Examples, free_bytes, singles_of
from adaecho.echo.memory.pytree import UNFIT, Columns, num_bytes, stack
from adaecho.echo.order import keyed
from adaecho.echo.read.chunks import NONE_SKIPPED, Preparation, Tried
from adaecho.echo.settings import Settings, one_of, refuse
from adaecho.echo.variants import BUFFER_FORMATS

Origin = Callable[[int], str]
Augment = Callable[[keyed.Items, Examples], Examples]
"""Examples and which they are, to as many."""

# Separates the seed of the first of two augmentations from that of the second.
_ONCE = 0x6F6E63655F666F72


class Augmentation:
    """A user's augmentation, of one of three kinds.

    * ``augment.block(arrays, keys)``: arrays [n, ...] in the form of an example, keys uint64 [n]; returns
      the same form. It draws with ``adaecho.echo.order.keyed`` and takes precedence.
    * ``augment(example, rng)``: ``rng`` is a NumPy generator keyed to this example and repeat.
    * ``augment(example)``: draws from the global generators of torch, NumPy and ``random``. The loader seeds
      them for each example and restores them afterwards, which is slower.

    Errors get a note that names the example.

    Args:
        augment: an augmentation of one of these kinds.
        seed: seed of its random numbers.
        origin: names the example of a serial in messages.

    Raises:
        ValueError: it is not callable, or takes another number of arguments.
    """

    def __init__(self, augment: Any, seed: int, origin: Origin = "example {}".format) -> None:
        self._augment, self._seed, self._origin = augment, seed, origin
        self._block = getattr(augment, "block", None)
        self._by_name, self._num_arguments = (
            (False, 0) if self._block is not None else arguments_of(augment, "augment")
        )
        self._seeds = self._num_arguments == 1 and not says_thread_safe(augment)

    def __call__(self, items: keyed.Items, examples: Examples) -> Examples:
        """Return the augmented examples of these items."""
        drawn = keyed.item_keys(self._seed, items)
        if self._block is not None:
            try:
                return _in_block(self._block, drawn, examples)
            except Exception as error:
                error.add_note(f"while augmenting {span(items, self._origin)}")
                raise
        with keyed.global_generators_kept() if self._seeds else nullcontext():
            given = zip(singles_of(examples), drawn.tolist(), strict=True)
            return one_by_one(self._drawn, given, items, self._origin, "while augmenting {}")

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
            f"augment.block needs examples of one shape and numeric type; {UNFIT}, or pass an "
            "augment(example, rng) without block"
        )
    return stacked.with_tree(block(stacked.tree(), drawn))


def says_thread_safe(function: Any) -> bool:
    """Whether a function, or the object of a method, declares ``thread_safe`` or has a ``block``."""
    owner = getattr(function, "__self__", None)
    return hasattr(function, "block") or any(getattr(one, "thread_safe", False) for one in (function, owner))


def augmentations(augment: Any, seed: int, origin: Origin) -> list[Augmentation]:
    """Return the augmentations of ``augment=``: none, one, or the two of (once, each_time).

    Raises:
        ValueError: it is another tuple, or not callable in this way.
    """
    if isinstance(augment, tuple) and len(augment) != 2:
        raise ValueError(f"augment: expected a tuple (once, each_time), got {len(augment)} parts")
    if isinstance(augment, tuple):
        once, each_time = augment
        return [Augmentation(once, seed ^ _ONCE, origin), Augmentation(each_time, seed, origin)]
    return [] if augment is None else [Augmentation(augment, seed, origin)]


def in_turn(augments: Sequence[Augment]) -> Augment | None:
    """Compose augmentations into one; None for an empty sequence."""

    def augmented(items: keyed.Items, examples: Examples) -> Examples:
        for augment in augments:
            examples = augment(items, examples)
        return examples

    return augmented if augments else None


def decoding_first(decode: Callable[[Any], Any], origin: Origin) -> Augment:
    """Return an augmentation that decodes, for a buffer of encoded examples."""
    note = f"while decoding {{}}; {NONE_SKIPPED}"
    return lambda items, examples: one_by_one(decode, zip(singles_of(examples)), items, origin, note)


def one_by_one(
    make: Callable[..., Any], given: Iterable[Any], items: keyed.Items, origin: Origin, note: str
) -> list[Any]:
    """Call ``make`` for each item; an error gets a note that names its example."""
    made: list[Any] = []
    try:
        for arguments in given:
            made.append(make(*arguments))
    except Exception as error:
        error.add_note(note.format(origin(int(items[len(made)]) >> keyed.ECHO_BITS)))
        raise
    return made


def span(items: keyed.Items, origin: Origin) -> str:
    """Name several items in a message: their first and last examples."""
    first, last = origin(int(items[0]) >> keyed.ECHO_BITS), origin(int(items[-1]) >> keyed.ECHO_BITS)
    return first if len(items) == 1 else f"{len(items)} examples, from {first} to {last}"


def arguments_of(function: Callable[..., Any], name: str) -> tuple[bool, int]:
    """Return whether a function takes its generator by name only, and its number of arguments, 1 or 2.

    Raises:
        ValueError: it cannot be called with an example (or a list of them) and a generator.
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
    """The user's functions.

    Attributes:
        decode, augment, collate, batch_length: arguments of EchoLoader.
        settings: settings of the loader.
        buffer_format: "decoded", "encoded" or "auto": the form of examples in the buffer.

    Raises:
        ValueError: one is not callable or would never be called, or the buffer cannot hold this form.
    """

    decode: Callable[[Any], Any] | None
    augment: Any
    collate: Callable[[list[Any]], Any] | None
    batch_length: Callable[[Any], int] | None
    settings: Settings
    buffer_format: str

    def __post_init__(self) -> None:
        for name in ("decode", "collate", "batch_length"):
            given = getattr(self, name)
            refuse(
                given is not None and not callable(given),
                f"{name}={given!r:.80}: must be a function, got {type(given).__name__}",
            )
        one_of("buffer_format", self.buffer_format, BUFFER_FORMATS)
        size, whole = self.settings.batch_size, self.settings.batch_size is None
        for name in ("augment", "collate"):
            refuse(
                whole and getattr(self, name) is not None,
                f"{name} with batch_size=None: {name} handles examples, but the source yields whole batches; "
                f"{name} in the source, or pass a source of examples and a batch_size",
            )
        refuse(
            self.batch_length is not None and not whole,
            f"batch_length with batch_size={size}: batch_length measures whole batches of the source; leave "
            "it out, or pass batch_size=None",
        )
        refuse(
            self.buffer_format == "encoded"
            and (self.decode is None or whole or self._augments_before_buffer),
            f"buffer_format='encoded' with echo={self.settings.echo!r}: the buffer holds encoded examples "
            "only with decode=, batch_size= and no augmentation before the echo; leave out buffer_format",
        )

    @property
    def _augments_before_buffer(self) -> bool:
        """Whether an augmentation, or the first of a pair, runs before the shuffle buffer."""
        variant = self.settings.variant
        return variant.augments_before or (variant.repeats == "examples" and isinstance(self.augment, tuple))

    def choose_buffer_format(self, peek: Callable[[], Any] | None) -> str:
        """Resolve ``auto`` to "decoded" or "encoded".

        ``peek`` returns the first example of the source, encoded; None for an iterable.
        """
        settings = self.settings
        if self.buffer_format != "auto":
            return self.buffer_format
        if self.decode is None or settings.batch_size is None or self._augments_before_buffer:
            return "decoded"
        if settings.variant.batches_upstream and not settings.max_bad_examples:
            return "encoded"
        return "decoded" if self._fits_decoded(peek) else "encoded"

    def _fits_decoded(self, peek: Callable[[], Any] | None) -> bool:
        """Whether a buffer of decoded examples fits into half of the free memory; True if unknown."""
        free = free_bytes()
        if free is None or peek is None:
            return True
        assert self.decode is not None
        try:
            first = self.decode(peek())
        except Exception:  # reading will report it
            return True
        return self.settings.shuffle_buffer * num_bytes(first) <= free / 2

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may decode and augment at once."""
        parts = self.augment if isinstance(self.augment, tuple) else (self.augment,)
        return all(part is None or says_thread_safe(part) for part in (self.decode, *parts))

    def around_the_buffer(self, buffer_format: str, origin: Origin) -> tuple[Preparation, Augment | None]:
        """Return the preparation before the buffer and the augmentation after it, which may decode first."""
        settings = self.settings
        parts = augmentations(self.augment, settings.seed, origin)
        # ``once`` of (once, each_time) runs before the echo.
        cut = len(parts) if settings.variant.augments_before else len(parts) - 1
        cut = max(cut, 0) if settings.variant.repeats == "examples" else 0
        before, after = in_turn(parts[:cut]), in_turn(parts[cut:])
        if self.decode is None or buffer_format == "decoded":
            return Preparation(self.decode, before), after
        # The loader can skip a bad example only before the buffer.
        tried = Tried(self.decode) if settings.max_bad_examples else None
        for_augment = getattr(self.decode, "for_augment", None)
        first = self.augment[0] if isinstance(self.augment, tuple) else self.augment
        decode = self.decode if for_augment is None else for_augment(first)
        return Preparation(tried, before), in_turn([decoding_first(decode, origin), *parts[cut:]])
