"""The functions of an EchoLoader, checked, and on which side of the buffer each of them works."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adaecho.echo.batch.augment import Augment, DecodeThenAugment, Origin, augmentations, in_turn
from adaecho.echo.memory.budget import free_bytes
from adaecho.echo.memory.tree import num_bytes
from adaecho.echo.read.chunks import Preparation, Tried
from adaecho.echo.settings import Settings, one_of
from adaecho.echo.variants import PLACES

Peek = Callable[[], Any]
"""The first example of the source as it is stored; None of what can only be iterated."""


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
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ValueError(
                    f"{name}={function!r:.80}: must be a function; a {type(function).__name__} is none"
                )
        one_of("place", self.place, PLACES)
        if self.settings.batch_size is None:
            self._check_whole_batches()
        elif self.batch_length is not None:
            raise ValueError(
                f"batch_length with batch_size={self.settings.batch_size}: only whole batches of the "
                "source are measured; leave it out, or give batch_size=None"
            )
        if self.place == "encoded":
            self._check_encoded()

    def _check_whole_batches(self) -> None:
        for name in ("augment", "collate"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} with batch_size=None: it is for examples, and the source's batches are whole; "
                    "leave it to their maker, or give a source of examples and a batch_size"
                )

    def _check_encoded(self) -> None:
        settings = self.settings
        if self.decode is None:
            raise ValueError(
                "place='encoded': without decode= examples are buffered as they come; leave it out"
            )
        if settings.batch_size is None:
            raise ValueError("place='encoded' with batch_size=None: whole batches are not decoded here")
        if self._augments_before_buffer:
            pair, otherwise = "", "echo='example_before_augmentation'"
            if not settings.variant.augments_before:
                pair, otherwise = " and augment=(once, each_time)", "one augment that does both"
            raise ValueError(
                f"place='encoded' with echo={settings.echo!r}{pair}: what is echoed there is decoded; choose "
                f"place='decoded' or {otherwise}"
            )

    @property
    def _augments_before_buffer(self) -> bool:
        """Whether what enters the shuffle buffer has been augmented, or is a pair's first part."""
        variant = self.settings.variant
        return variant.augments_before or (variant.repeats == "examples" and isinstance(self.augment, tuple))

    def choose_place(self, peek: Peek | None) -> str:
        """``auto`` resolved: whether the buffer holds examples decoded or as they are stored."""
        settings = self.settings
        if self.place != "auto":
            return self.place
        if self.decode is None or settings.batch_size is None or self._augments_before_buffer:
            return "decoded"
        if settings.variant.batches_upstream and not settings.max_bad_examples:
            return "encoded"
        return "decoded" if self._fits_decoded(peek) else "encoded"

    def _fits_decoded(self, peek: Peek | None) -> bool:
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

    def around_the_buffer(
        self, place: str, origin: Origin, *, threads: bool
    ) -> tuple[Preparation, Augment | None]:
        """What happens to examples before the buffer, and what augments after it, decoding if nothing has."""
        settings = self.settings
        parts = augmentations(self.augment, settings.seed, origin, threads=threads)
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
        return Preparation(tried, before), DecodeThenAugment(decode, after, origin)
