"""The variants of data echoing, and the other named choices, shared with the configuration.

This module imports nothing else of adaecho.
"""

import numbers
from dataclasses import dataclass
from typing import Any

ORDERS = ("permutation", "shards", "sequential")
BUFFER_FORMATS = ("auto", "decoded", "encoded")
MAX_FACTOR = 1 << 16  # an item holds its echo index in 16 bits: order.keyed


@dataclass(frozen=True)
class Variant:
    """One of the pipelines of the paper's section 3.

    Attributes:
        name: value of the argument ``echo``.
        stages: stages in the paper's order.
        repeats: "examples" or "batches", the items of the echo; "" without an echo. Stages before the echo
            are upstream; without an echo all stages but the step are.
        augments_before: augmentation comes before the echo, so that the buffer holds decoded examples.
    """

    name: str
    stages: str
    repeats: str = ""
    augments_before: bool = False

    @property
    def batches_upstream(self) -> bool:
        """Whether batches are made before the echo, so that the source may yield whole batches."""
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
    """Raise ValueError if a variant cannot have this factor or buffer of batches.

    Args:
        variant: the variant.
        factor: a number in [1, MAX_FACTOR), or "auto".
        max_factor: bound of "auto", in [1, MAX_FACTOR).
        batch_shuffle_buffer: number of batches.
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
