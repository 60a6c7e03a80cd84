"""Workarounds for two cases in which PyTorch Lightning would resume a loader at the wrong batch.

*Prefetch*: if a loader has no length, Lightning requests each batch one step before it trains on it. A
checkpoint would then count this batch as used, and a resume would skip it.

*End of an epoch*: if a checkpoint was saved at the end of an epoch, Lightning does not pass the loader's
state to the loader. Training would then repeat the batches of the first epoch. With ``max_steps``, Lightning
passes the state, but first requests an iterator only to end the completed epoch. This request would skip an
epoch.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

# Lightning informs a loader of neither case, so both workarounds search the call stack for its loop
# (``_PrefetchDataFetcher`` and ``FitLoop.restarting``).
_DEPTH = 3  # the fetcher nests a batch in a tuple with its index and in a collection over several loaders


def holds_last_batch(batch_id: int) -> bool:
    """Return whether Lightning has requested the last batch, but has not trained on it yet.

    Args:
        batch_id: ``id()`` of the last batch that the loader returned.
    """
    fetchers = (getattr(loop, "_data_fetcher", None) for _, loop in _methods_that_call())
    return _holds(getattr(next(filter(None, fetchers), None), "batches", ()), batch_id, _DEPTH)


def resumed_at_end(loader: Any) -> tuple[dict[str, Any] | None, bool] | None:
    """Return how to begin an iteration that Lightning requests when it resumes at the end of an epoch.

    Returns:
        None if the caller is not a Lightning Trainer that resumes at the end of an epoch. The iteration then
        begins as usual. Otherwise a pair:

        * The state that the loader must load first. It is None if Lightning has loaded it already, or has no
          state for this loader.
        * Whether the iterator must be empty, because Lightning requests it only to end the completed epoch.
    """
    loop: Any = next((loop for name, loop in _methods_that_call() if name == "setup_data"), None)
    combined = getattr(loop, "_combined_loader", None)  # None while Lightning checks the loader
    if combined is None or not getattr(loop, "is_resuming", False):
        return None
    stateful = [one for one in combined.flattened if hasattr(one, "load_state_dict")]
    place = next((place for place, one in enumerate(stateful) if one is loader), None)
    if place is None:
        return None
    if not loop.restarting:
        states = loop._combined_loader_states_to_load
        return states[place] if len(states) == len(stateful) else None, False
    epochs, batches = loop.epoch_progress.total, loop.epoch_loop.batch_progress
    if not batches.is_last_batch:
        return None
    # If the state was saved before on_train_batch_end completed, this iterator begins a new epoch.
    begun, through = epochs.started == epochs.ready, batches.total.completed == batches.total.processed
    return None, begun and through


def _methods_that_call() -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each Lightning method on the call stack, innermost first."""
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
