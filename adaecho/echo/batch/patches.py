"""``place="augmented"``: each repeat is augmented when its example is read, and the buffer holds the results.

For examples much larger than what augmentation cuts out of them (volumes, tiles, videos), of which the buffer
then holds patches alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.batch.augment import Augment
from adaecho.echo.memory.pool import Examples
from adaecho.echo.memory.tree import Columns, duplicate
from adaecho.echo.order import keyed


class Patches(dict[int, Any]):
    """What a fresh example's repeats will be, by echo index; each is taken once, and then gone."""

    def __deepcopy__(self, memo: Any) -> "Patches":
        """Itself: the pool copies an example for each repeat but the last, and here each has its own."""
        return self


class CutPatches:
    """Makes the patches of a fresh example.

    Args:
        once: the first part of a pair, for each fresh example; None where there is none.
        each_time: for each of its repeats; None where there is none.
        counts: how often examples repeat, from their serials [n], int64 [n].
    """

    def __init__(
        self,
        once: Augment | None,
        each_time: Augment | None,
        counts: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    ) -> None:
        self._once, self._each_time, self._counts = once, each_time, counts

    def __call__(self, serial: int, example: Any) -> Patches:
        """The patches of the example with this serial, which may be written into."""
        serials = np.array([serial], dtype=np.int64)  # [1]
        items = keyed.uses(serials, self._counts(serials))  # [repeats]
        example = _one(self._once, items[:1], example)
        last = len(items) - 1
        patches = Patches()
        for echo in range(len(items)):
            # What augment writes into must not reach the next repeat.
            whole = example if echo == last else duplicate(example)
            # A patch may be a view, which would keep the whole example alive.
            patches[echo] = duplicate(_one(self._each_time, items[echo : echo + 1], whole))
        return patches


def _one(augment: Augment | None, item: keyed.Items, example: Any) -> Any:
    """One example, augmented as one of many."""
    if augment is None:
        return example
    augmented = augment(item, [example])
    return (augmented.examples() if isinstance(augmented, Columns) else augmented)[0]


def take_patches(items: keyed.Items, examples: Examples) -> Examples:
    """Give each example's patch for its item: what ``augment`` does where this has been done before."""
    assert not isinstance(examples, Columns)
    patches: Sequence[Patches] = examples
    echoes = (items % keyed.MAX_ECHOES).tolist()
    return [patches[n].pop(echo) for n, echo in enumerate(echoes)]
