"""What a user gives to be called, checked, and on which side of the buffer it works.

Augmentation is keyed to (seed, fresh serial, echo index), one example at a time or vectorised.
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
from adaecho.echo.variants import PLACES

Origin = Callable[[int], str]
Augment = Callable[[keyed.Items, Examples], Examples]
"""Examples and which they are, to as many."""

# Draws of the first of two augmentations come from another seed than those of the second, and than any that
# a user is likely to give another loader.
_ONCE = 0x6F6E63655F666F72


class Augmentation:
    """A user's augmentation, whichever of three kinds it is.

    * ``augment.block(arrays, keys)``: arrays [n, ...] in the form of an example, keys uint64 [n]; returns
      the same form. Draw with ``adaecho.echo.order.keyed``. It is used wherever it exists.
    * ``augment(example, rng)``: ``rng`` is a NumPy generator of this example and repeat.
    * ``augment(example)``: draws from the global generators of torch, NumPy and ``random``, which are seeded
      for each example and given back afterwards; slower.

    What it raises is passed on with a note of the example.

    Args:
        augment: one of these.
        seed: of its draws.
        origin: what to call the example of a serial in a message.

    Raises:
        ValueError: it is not callable or takes another number of arguments.
    """

    def __init__(self, augment: Any, seed: int, origin: Origin = "example {}".format) -> None:
        self._augment, self._seed, self._origin = augment, seed, origin
        self._block = getattr(augment, "block", None)
        self._by_name, self._num_arguments = (
            (False, 0) if self._block is not None else arguments_of(augment, "augment")
        )
        self._seeds = self._num_arguments == 1 and not says_thread_safe(augment)

    def __call__(self, items: keyed.Items, examples: Examples) -> Examples:
        """The augmented examples of these items."""
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
            f"augment.block needs examples of one shape and numeric type; {UNFIT}, or give an "
            "augment(example, rng) without block"
        )
    return stacked.with_tree(block(stacked.tree(), drawn))


def says_thread_safe(function: Any) -> bool:
    """Whether a function, or the object whose method it is, says so; what has a ``block`` is vectorised."""
    owner = getattr(function, "__self__", None)
    return hasattr(function, "block") or any(getattr(one, "thread_safe", False) for one in (function, owner))


def augmentations(augment: Any, seed: int, origin: Origin) -> list[Augmentation]:
    """What ``augment=`` was given, in turn: none, one, or the two of (once, each_time).

    Raises:
        ValueError: it is another tuple, or can't be called so.
    """
    if isinstance(augment, tuple) and len(augment) != 2:
        raise ValueError(f"augment: a tuple is (once, each_time), and this one has {len(augment)} parts")
    if isinstance(augment, tuple):
        once, each_time = augment
        return [Augmentation(once, seed ^ _ONCE, origin), Augmentation(each_time, seed, origin)]
    return [] if augment is None else [Augmentation(augment, seed, origin)]


def in_turn(augments: Sequence[Augment]) -> Augment | None:
    """One after another as a single one; None where there is none."""

    def augmented(items: keyed.Items, examples: Examples) -> Examples:
        for augment in augments:
            examples = augment(items, examples)
        return examples

    return augmented if augments else None


def decoding_first(decode: Callable[[Any], Any], origin: Origin) -> Augment:
    """What decodes after the buffer, where that holds examples as they are stored, one by one."""
    note = f"while decoding {{}}; {NONE_SKIPPED}"
    return lambda items, examples: one_by_one(decode, zip(singles_of(examples)), items, origin, note)


def one_by_one(
    make: Callable[..., Any], given: Iterable[Any], items: keyed.Items, origin: Origin, note: str
) -> list[Any]:
    """What is made of what is given for each item; an error gets a note of what to call its example."""
    made: list[Any] = []
    try:
        for arguments in given:
            made.append(make(*arguments))
    except Exception as error:
        error.add_note(note.format(origin(int(items[len(made)]) >> keyed.ECHO_BITS)))
        raise
    return made


def span(items: keyed.Items, origin: Origin) -> str:
    """What to call many items in a message: the first and the last of their examples."""
    first, last = origin(int(items[0]) >> keyed.ECHO_BITS), origin(int(items[-1]) >> keyed.ECHO_BITS)
    return first if len(items) == 1 else f"{len(items)} examples, from {first} to {last}"


def arguments_of(function: Callable[..., Any], name: str) -> tuple[bool, int]:
    """How a function is called: whether its generator goes by name, as another argument is the second; and
    with how many arguments.

    Raises:
        ValueError: it can't be called with an example (or a list of them) and a generator.
    """
    if not callable(function):
        pair = "; two parts are a tuple, (once, each_time)" * isinstance(function, list)
        raise ValueError(f"{name}: a {type(function).__name__} can't be called and has no block{pair}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return False, 1  # written in C without a signature: a plain function of the example
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
    """What a user gives to be called.

    Attributes:
        decode, augment, collate, batch_length: as EchoLoader's arguments.
        settings: of the loader.
        place: "decoded", "encoded" or "auto": how the buffer holds examples.

    Raises:
        ValueError: one can't be called, or never would be, or the buffer can't hold examples in that form.
    """

    decode: Callable[[Any], Any] | None
    augment: Any
    collate: Callable[[list[Any]], Any] | None
    batch_length: Callable[[Any], int] | None
    settings: Settings
    place: str

    def __post_init__(self) -> None:
        for name in ("decode", "collate", "batch_length"):
            given = getattr(self, name)
            refuse(
                given is not None and not callable(given),
                f"{name}={given!r:.80}: must be a function; a {type(given).__name__} is none",
            )
        one_of("place", self.place, PLACES)
        size, whole = self.settings.batch_size, self.settings.batch_size is None
        for name in ("augment", "collate"):
            refuse(
                whole and getattr(self, name) is not None,
                f"{name} with batch_size=None: it is for examples, and the source's batches are whole; leave "
                "it to their maker, or give a source of examples and a batch_size",
            )
        refuse(
            self.batch_length is not None and not whole,
            f"batch_length with batch_size={size}: only whole batches of the source are measured; leave it "
            "out, or give batch_size=None",
        )
        if self.place == "encoded":
            self._check_encoded()

    def _check_encoded(self) -> None:
        settings, encoded = self.settings, "place='encoded'"
        refuse(
            self.decode is None,
            f"{encoded}: without decode= examples are buffered as they come; leave it out",
        )
        refuse(
            settings.batch_size is None,
            f"{encoded} with batch_size=None: whole batches are not decoded here",
        )
        pair, otherwise = "", "echo='example_before_augmentation'"
        if not settings.variant.augments_before:
            pair, otherwise = " and augment=(once, each_time)", "one augment that does both"
        refuse(
            self._augments_before_buffer,
            f"{encoded} with echo={settings.echo!r}{pair}: what is echoed there is decoded; choose "
            f"place='decoded' or {otherwise}",
        )

    @property
    def _augments_before_buffer(self) -> bool:
        """Whether what enters the shuffle buffer has been augmented, or is a pair's first part."""
        variant = self.settings.variant
        return variant.augments_before or (variant.repeats == "examples" and isinstance(self.augment, tuple))

    def choose_place(self, peek: Callable[[], Any] | None) -> str:
        """``auto`` resolved: whether the buffer holds examples decoded or as they are stored.

        ``peek`` gives the source's first example as it is stored; None where it can only be iterated.
        """
        settings = self.settings
        if self.place != "auto":
            return self.place
        if self.decode is None or settings.batch_size is None or self._augments_before_buffer:
            return "decoded"
        if settings.variant.batches_upstream and not settings.max_bad_examples:
            return "encoded"
        return "decoded" if self._fits_decoded(peek) else "encoded"

    def _fits_decoded(self, peek: Callable[[], Any] | None) -> bool:
        """Whether so many like the first would leave half of the free memory; unknown of a stream."""
        free = free_bytes()
        if free is None or peek is None:
            return True
        assert self.decode is not None
        try:
            first = self.decode(peek())
        except Exception:  # a bad one, or a broken transfer: reading will tell
            return True
        return self.settings.shuffle_buffer * num_bytes(first) <= free / 2

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may decode and augment at once."""
        parts = self.augment if isinstance(self.augment, tuple) else (self.augment,)
        return all(part is None or says_thread_safe(part) for part in (self.decode, *parts))

    def around_the_buffer(self, place: str, origin: Origin) -> tuple[Preparation, Augment | None]:
        """What happens to examples before the buffer, and what augments after it, decoding if nothing has."""
        settings = self.settings
        parts = augmentations(self.augment, settings.seed, origin)
        # Of (once, each_time) the first is done with before repeats of examples are made.
        cut = len(parts) if settings.variant.augments_before else len(parts) - 1
        cut = max(cut, 0) if settings.variant.repeats == "examples" else 0
        before, after = in_turn(parts[:cut]), in_turn(parts[cut:])
        if self.decode is None or place == "decoded":
            return Preparation(self.decode, before), after
        # What is found bad after the buffer can't be skipped any more.
        tried = Tried(self.decode) if settings.max_bad_examples else None
        for_augment = getattr(self.decode, "for_augment", None)
        first = self.augment[0] if isinstance(self.augment, tuple) else self.augment
        decode = self.decode if for_augment is None else for_augment(first)
        return Preparation(tried, before), in_turn([decoding_first(decode, origin), *parts[cut:]])
