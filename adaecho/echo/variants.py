"""What the variants of data echoing are: where the echo lies, and what that decides. Imports nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One of the pipelines of the paper's section 3.

    Attributes:
        name: as the argument ``echo`` takes it.
        stages: in the paper's order.
        repeats: what leaves the echo several times, "examples" or "batches"; "" where there is no echo, so
            that no factor applies. What comes before the echo is upstream; without one all but the step.
        augments_before: augmentation comes before the echo, and what the buffer holds is always decoded.
    """

    name: str
    stages: str
    repeats: str = ""
    augments_before: bool = False

    @property
    def batches_upstream(self) -> bool:
        """Whether batches are made before the echo, so that whole ones can be read instead of examples."""
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
