"""Whether PyTorch Lightning, asking for a loader's state, has taken a batch of it that no step has seen.

Of a loader without a length its fetcher takes one batch ahead of the step, to know which is the last
(``lightning.pytorch.loops.fetchers._PrefetchDataFetcher``). It saves ``state_dict()`` of the loader as it is
then, and offers no way to be told: that batch would be lost at a resume. So its loop is looked up among
the callers; of several loaders, the batch tells whether it is this one's.
"""

import sys
from typing import Any

_DEPTH = 3  # a batch, its number and its loader's; the batches of several loaders, in a dict or list


def holds_last_batch(batch_id: int) -> bool:
    """Whether the Lightning loop that calls, if one does, holds a batch that it has not given to a step.

    Args:
        batch_id: ``id`` of the last batch given.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("lightning.", "pytorch_lightning.")):
            fetcher = getattr(frame.f_locals.get("self"), "_data_fetcher", None)
            if fetcher is not None:
                return _holds(getattr(fetcher, "batches", ()), batch_id, _DEPTH)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _holds(parts: Any, batch_id: int, depth: int) -> bool:
    if id(parts) == batch_id:
        return True
    if isinstance(parts, dict):
        parts = parts.values()
    elif not isinstance(parts, list | tuple):
        return False
    return depth > 0 and any(_holds(part, batch_id, depth - 1) for part in parts)
