"""What tells and takes its own position: a StatefulDataLoader, Grain's iterators, an EchoLoader."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from adaecho.echo.read.marks import OwnState

APART = 16  # examples or batches between two questions: to tell one may take as long as to read an example


class Teller(NamedTuple):
    """What tells a position, and takes it again."""

    ask: Callable[[], Any]
    give: Callable[[Any], Any]

    def tell(self) -> OwnState:
        """Where it is; a copy, as it may go on in the one it told."""
        return OwnState(copy.deepcopy(self.ask()))

    def take(self, position: OwnState) -> None:
        """Go there."""
        self.give(copy.deepcopy(position.state))


def teller_of(owner: Any) -> Teller | None:
    """How an object tells and takes its own position, if it does.

    A stream of Hugging Face's ``datasets`` is not asked, nor a loader of one: with ``shuffle`` its state
    leaves out what its buffer held, and other examples would follow.
    """
    streams = [owner, getattr(owner, "dataset", None), getattr(owner, "_dataset", None)]
    if any(kind.__module__.startswith("datasets.") for part in streams for kind in type(part).__mro__):
        return None
    for ask, give in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(owner, ask) and hasattr(owner, give) and getattr(owner, "use_stateful_dataloader", True):
            return Teller(getattr(owner, ask), getattr(owner, give))
    return None  # also of Accelerate's loaders around what has no state
