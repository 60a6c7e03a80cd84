"""Work around two properties of Lightning's loops, which do not notify a loader.

*Taken*: of a loader without a length its fetcher takes one batch ahead of the step, to know which is the last
(``lightning.pytorch.loops.fetchers._PrefetchDataFetcher``). It saves ``state_dict()`` of the loader as it is
then: that batch would be lost at a resume.

*Left undone*: a checkpoint of an epoch's end, which is its default, holds the loader's state, which isn't
loaded (``FitLoop.restarting``: "if the last epoch completely finished, we are not actually restarting"): the
first epoch's batches would come again. With ``max_steps`` it is loaded, but the loop finishes the epoch that
had ended with the iterator that it makes first, and makes another for the next: one would be left out.

So the loop is looked up among the callers.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

_DEPTH = 3  # a batch, its number and its loader's; the batches of several loaders, in a dict or list


def holds_last_batch(batch_id: int) -> bool:
    """Whether the loop that calls, if one does, holds a batch that it has not given to a step.

    Args:
        batch_id: ``id`` of the last batch given; of several loaders it tells whether it is this one's.
    """
    fetchers = (getattr(loop, "_data_fetcher", None) for _, loop in _methods_that_call())
    return _holds(getattr(next(filter(None, fetchers), None), "batches", ()), batch_id, _DEPTH)


class EpochEnd(NamedTuple):
    """What a Trainer that resumes after an epoch's last batch leaves to a loader of its.

    Attributes:
        state: to be loaded, if that is left.
        is_over: the iterator it asks for is that of the epoch that had ended, and has nothing to give.
    """

    state: dict[str, Any] | None
    is_over: bool


def resumed_at_end(loader: Any) -> EpochEnd | None:
    """What a Trainer leaves that asks for its first iterator after an epoch's end; None if none does."""
    loop: Any = next((loop for name, loop in _methods_that_call() if name == "setup_data"), None)
    combined = getattr(loop, "_combined_loader", None)  # None while it only tries whether it can iterate
    if combined is None or not getattr(loop, "is_resuming", False):
        return None
    stateful = [one for one in combined.flattened if hasattr(one, "load_state_dict")]
    place = next((place for place, one in enumerate(stateful) if one is loader), None)
    if place is None:
        return None
    if not loop.restarting:
        states = loop._combined_loader_states_to_load
        return EpochEnd(states[place] if len(states) == len(stateful) else None, is_over=False)
    epochs, batches = loop.epoch_progress.total, loop.epoch_loop.batch_progress
    if not batches.is_last_batch:
        return None
    # Of a state saved before on_train_batch_end was through it begins an epoch with this iterator.
    begun, through = epochs.started == epochs.ready, batches.total.completed == batches.total.processed
    return EpochEnd(None, is_over=begun and through)


def _methods_that_call() -> Iterator[tuple[str, Any]]:
    """Of Lightning, the innermost first: the name of each and its object."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("lightning.", "pytorch_lightning.")):
            yield frame.f_code.co_name, frame.f_locals.get("self")
        frame = frame.f_back


def _holds(parts: Any, batch_id: int, depth: int) -> bool:
    if id(parts) == batch_id:
        return True
    if isinstance(parts, dict):
        parts = parts.values()
    elif not isinstance(parts, list | tuple):
        return False
    return depth > 0 and any(_holds(part, batch_id, depth - 1) for part in parts)
