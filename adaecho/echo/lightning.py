"""Workarounds that let PyTorch Lightning resume a loader at the right batch.

* *Prefetch*: if a loader has no length, Lightning requests each batch one step before training on it. A
  checkpoint must not count this batch as used. ``holds_last_batch`` detects it.
* *End of an epoch*: Lightning does not load a loader state that was saved at the end of an epoch, so training
  would repeat the first epoch. ``resumed_at_end`` returns this state, and the loader loads it.
* *Maximum number of steps*: with ``max_steps``, Lightning does load this state. It then requests an iterator
  for an epoch that has already ended. ``resumed_at_end`` detects this, and the loader returns an empty
  iterator.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

# Lightning signals neither case to the loader, so both workarounds search the call stack for its loop
# (``_PrefetchDataFetcher`` and ``FitLoop.restarting``).
_DEPTH = 3  # the fetcher nests a batch in a tuple with its index and in a collection over several loaders


def holds_last_batch(batch_id: int) -> bool:
    """Return whether Lightning has fetched the batch with this ``id()``, but not trained on it yet."""
    fetchers = (getattr(loop, "_data_fetcher", None) for _, loop in _methods_that_call())
    return _holds(getattr(next(filter(None, fetchers), None), "batches", ()), batch_id, _DEPTH)


def resumed_at_end(loader: Any) -> tuple[dict[str, Any] | None, bool] | None:
    """Detect whether Lightning is resuming at the end of an epoch, and return how the loader must react."""
    # Otherwise return None. The returned pair contains the state that the loader must load (or None), and
    # whether its next iterator must be empty.
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
