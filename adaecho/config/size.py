"""What ``scale=`` needs to know of the data, which ``datasets.size`` finds out."""

from dataclasses import dataclass

_MOST_HELD_OUT = 1_000


@dataclass(frozen=True)
class Size:
    """How much there is to train on.

    Attributes:
        examples: in the training files.
        units: what ``data.validation_examples`` holds out of: the examples themselves, or documents of them.
        has_validation: whether there is a validation split beside them.
        name: of the examples.
    """

    examples: int
    units: int
    has_validation: bool
    name: str = "images"

    @property
    def held_out(self) -> int | None:
        """Units to hold out: a fifth, at most 1,000; None where there is a validation split."""
        return None if self.has_validation else max(1, min(self.units // 5, _MOST_HELD_OUT))

    @property
    def training(self) -> int:
        """Examples that are left, in proportion."""
        return max(1, self.examples - self.examples * (self.held_out or 0) // self.units)
