"""Workarounds for two properties of Lightning's loops, which do not notify a loader.

*Prefetch*: from a loader without a length the fetcher takes one batch ahead of the step, to detect the last
one (``lightning.pytorch.loops.fetchers._PrefetchDataFetcher``). It then saves the loader's ``state_dict()``,
so a resume would lose that batch.

*End of an epoch*: a checkpoint at the end of an epoch, the default, holds the loader's state, but Lightning
does not load it (``FitLoop.restarting``: "if the last epoch completely finished, we are not actually
restarting"). The batches of the first epoch would come again. With ``max_steps`` Lightning loads the state,
but it uses the first iterator to finish the completed epoch, and would skip one epoch.

Both workarounds find the loop among the callers.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

_DEPTH = 3  # nesting of a batch, its index, and the batches of several loaders


def holds_last_batch(batch_id: int) -> bool:
    """Whether a calling loop holds a batch that no step has received.

    Args:
        batch_id: ``id`` of the last batch of this loader.
    """
    fetchers = (getattr(loop, "_data_fetcher", None) for _, loop in _methods_that_call())
    return _holds(getattr(next(filter(None, fetchers), None), "batches", ()), batch_id, _DEPTH)


class EpochEnd(NamedTuple):
    """Tasks of a loader whose Trainer resumes after the last batch of an epoch.

    Attributes:
        state: the state to load, or None.
        is_over: whether the requested iterator is of the completed epoch and must be empty.
    """

    state: dict[str, Any] | None
    is_over: bool


def resumed_at_end(loader: Any) -> EpochEnd | None:
    """Return the tasks if a Trainer that resumed at the end of an epoch requests its first iterator."""
    loop: Any = next((loop for name, loop in _methods_that_call() if name == "setup_data"), None)
    combined = getattr(loop, "_combined_loader", None)  # None during the check that the loader is iterable
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
    # With a state saved before on_train_batch_end completed, this iterator begins an epoch.
    begun, through = epochs.started == epochs.ready, batches.total.completed == batches.total.processed
    return EpochEnd(None, is_over=begun and through)


def _methods_that_call() -> Iterator[tuple[str, Any]]:
    """Yield the name and object of each calling method of Lightning, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("lightning.", "pytorch_lightning.")):
            yield frame.f_code.co_name, frame.f_locals.get("self")
        frame = frame.f_back


def _holds(parts: Any, batch_id: int, depth: int) -> bool:
    if id(parts) == batch_id:
        return True
    inner = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list | tuple) else ()
    return depth > 0 and any(_holds(part, batch_id, depth - 1) for part in inner)
