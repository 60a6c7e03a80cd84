"""Augmentation keyed to (seed, fresh serial, echo index), one example at a time or vectorised."""

import inspect
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

from adaecho.echo.memory.pool import Examples
from adaecho.echo.memory.tree import Columns, obstacle, remedy, stack
from adaecho.echo.order import keyed
from adaecho.echo.read.failures import NONE_SKIPPED
from adaecho.echo.threads.seeded_process import SeededProcess, global_generators_kept, one_by_one, seeded
from adaecho.echo.threads.workers import PoolThread

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
      for each example and given back afterwards. Slower; worker threads have it done in processes.

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
        self.uses_global_generators = self._block is None and _num_arguments(augment) == 1

    def __call__(self, items: keyed.Items, examples: Examples) -> Examples:
        """The augmented examples of these items."""
        drawn = keyed.item_keys(self._seed, items)
        if self._block is not None:
            try:
                return _in_block(self._block, drawn, examples)
            except Exception as error:
                error.add_note(f"while augmenting {span(items, self._origin)}")
                raise
        singles = examples.examples() if isinstance(examples, Columns) else examples

        def failed(error: Exception, position: int) -> None:
            error.add_note(f"while augmenting {self._origin(int(items[position]) >> keyed.ECHO_BITS)}")

        if not self.uses_global_generators:
            return one_by_one(self._with_generator, singles, drawn, failed)
        thread = threading.current_thread()
        if isinstance(thread, PoolThread):
            if self not in thread.helpers:
                augmenting = SeededProcess(self._pickled(), "augment", "augment(example, rng)")
                thread.helpers[self] = augmenting
            augmented: list[Any] = thread.helpers[self](singles, drawn.tolist(), failed)
            return augmented
        with global_generators_kept():
            return seeded(self._augment, singles, drawn.tolist(), failed)

    def _with_generator(self, example: Any, key: Any) -> Any:
        return self._augment(example, keyed.generator(key))

    def check_threads(self) -> None:
        """Raises ValueError where it can't be run by worker threads."""
        if self.uses_global_generators:
            self._pickled()

    def _pickled(self) -> bytes:
        try:
            return pickle.dumps(self._augment)
        except Exception as error:
            raise ValueError(
                "augment: of one argument with num_workers > 0 it runs in worker processes, and can't be "
                f"pickled for them ({error}); define it at the top of a module, without lambdas, or give "
                "augment(example, rng), or num_workers=0"
            ) from error


def _in_block(block: Callable[[Any, keyed.Keys], Any], drawn: keyed.Keys, examples: Examples) -> Columns:
    if isinstance(examples, Columns):
        return examples.with_tree(block(examples.tree(), drawn))
    stacked = stack(examples)
    if stacked is None:
        unfit = next((example for example in examples if obstacle(example) is not None), None)
        if unfit is not None:
            raise ValueError(
                f"augment.block needs arrays, tensors and numbers, and an example holds {obstacle(unfit)}; "
                f"{remedy(unfit)}, or give an augment(example, rng) without block"
            )
        raise ValueError(
            "augment.block needs examples of one shape and numeric type, and these differ; make decode give "
            "them one shape, or give an augment(example, rng) without block"
        )
    return stacked.with_tree(block(stacked.tree(), drawn))


def augmentations(augment: Any, seed: int, origin: Origin, *, threads: bool) -> list[Augmentation]:
    """What ``augment=`` was given, in turn: none, one, or the two of (once, each_time).

    Raises:
        ValueError: it is another tuple, can't be called so, or can't be run by ``threads``.
    """
    if isinstance(augment, tuple) and len(augment) != 2:
        raise ValueError(f"augment: a tuple is (once, each_time), and this one has {len(augment)} parts")
    if isinstance(augment, tuple):
        once, each_time = augment
        both = [Augmentation(once, seed ^ _ONCE, origin), Augmentation(each_time, seed, origin)]
    else:
        both = [] if augment is None else [Augmentation(augment, seed, origin)]
    for augmentation in both if threads else []:
        augmentation.check_threads()
    return both


def in_turn(augments: Sequence[Augment]) -> Augment | None:
    """One after another as a single one; None where there is none."""

    def augmented(items: keyed.Items, examples: Examples) -> Examples:
        for augment in augments:
            examples = augment(items, examples)
        return examples

    return augmented if augments else None


class DecodeThenAugment:
    """What comes after the buffer where it holds examples as they are stored.

    Args:
        decode: one example, deterministic.
        augment: decoded examples, if at all.
        origin: what to call the example of a serial in a message.
    """

    def __init__(
        self,
        decode: Callable[[Any], Any],
        augment: Augment | None,
        origin: Origin,
    ) -> None:
        self._decode, self._augment, self._origin = decode, augment, origin

    def __call__(self, items: keyed.Items, examples: Examples) -> Examples:
        """The decoded and augmented examples of these items."""
        singles = examples.examples() if isinstance(examples, Columns) else examples
        decoded = [self._decoded(int(item), single) for item, single in zip(items, singles, strict=True)]
        return decoded if self._augment is None else self._augment(items, decoded)

    def _decoded(self, item: int, example: Any) -> Any:
        try:
            return self._decode(example)
        except Exception as error:
            origin = self._origin(item >> keyed.ECHO_BITS)
            error.add_note(f"while decoding {origin}; {NONE_SKIPPED}")
            raise


def span(items: keyed.Items, origin: Origin) -> str:
    """What to call many items in a message: the first and the last of their examples."""
    first, last = origin(int(items[0]) >> keyed.ECHO_BITS), origin(int(items[-1]) >> keyed.ECHO_BITS)
    return first if len(items) == 1 else f"{len(items)} examples, from {first} to {last}"


def _num_arguments(augment: Callable[..., Any]) -> int:
    if not callable(augment):
        pair = "; two parts are a tuple, (once, each_time)" * isinstance(augment, list)
        raise ValueError(f"augment: a {type(augment).__name__} can't be called and has no block{pair}")
    try:
        parameters = inspect.signature(augment).parameters.values()
    except ValueError:
        return 1  # written in C without a signature: a plain function of the example
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    if len(required) > 2:
        raise ValueError(f"augment: takes {len(required)} arguments; must be augment(example, rng)")
    named_rng = any(p.name == "rng" for p in parameters)
    return 2 if len(required) == 2 or named_rng else 1
