"""The variants of data echoing and the other named options of a loader."""

import numbers
from dataclasses import dataclass
from typing import Any

ORDERS = ("permutation", "shards", "sequential")
BUFFER_FORMATS = ("auto", "decoded", "encoded")
MAX_FACTOR = 1 << 16  # order.keyed stores the index of a repeat in 16 bits


@dataclass(frozen=True)
class Variant:
    """One way to insert an echo stage, which repeats data, into the input pipeline (paper, section 3).

    Attributes:
        name: value of the loader's argument ``echo``.
        stages: names of the stages in the order in which data pass through them.
        repeats: what the echo stage repeats, "examples" or "batches"; "" if there is no echo stage.
        augments_before: whether examples are augmented before they enter the shuffle buffer of examples.
    """

    name: str
    stages: str
    repeats: str = ""
    augments_before: bool = False

    @property
    def batches_upstream(self) -> bool:
        """Whether batches are made before the echo stage. Only then can a source yield whole batches."""
        return self.repeats != "examples"


_ALL = (
    Variant("none", "read > decode > shuffle > augment > batch"),
    Variant("batch", "read > decode > shuffle > augment > batch > echo [> shuffle batches]", "batches"),
    Variant(
        "example_before_augmentation", "read > decode > echo > shuffle > augment > batch", "examples"
    ),
    Variant(
        "example_after_augmentation", "read > decode > augment > echo > shuffle > batch", "examples",
        augments_before=True,
    ),
)  # fmt: skip
VARIANTS = {variant.name: variant for variant in _ALL}


def check_factor(variant: Variant, factor: Any, max_factor: float, batch_shuffle_buffer: int) -> None:
    """Raise ValueError if an argument is out of range or does not suit the variant of data echoing.

    Args:
        factor: the echoing factor, a number or "auto".
        max_factor: upper bound on the factor under "auto".
    """
    if not 1 <= max_factor < MAX_FACTOR:
        raise ValueError(f"max_factor={max_factor}: must lie in [1, {MAX_FACTOR})")
    if batch_shuffle_buffer and variant.repeats != "batches":
        raise ValueError(f"batch_shuffle_buffer={batch_shuffle_buffer}: only echo=batch repeats batches")
    if factor != "auto":
        real = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
        if not real or not 1 <= factor < MAX_FACTOR:
            raise ValueError(
                f"factor={factor!r}: must be a number, at least 1 and less than {MAX_FACTOR}, or auto"
            )
    if not variant.repeats and factor != 1:
        raise ValueError(
            f"factor={factor}: echo={variant.name} repeats nothing; choose a variant, or factor 1"
        )
