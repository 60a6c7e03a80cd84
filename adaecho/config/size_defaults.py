"""``scale=images`` and ``scale=text``: defaults that follow from the size of the data.

They set split, batch size, buffer, evaluations and budget. The paper's values are for a million images.
"""

import functools
import json
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adaecho.config.tasks import Size, TaskConfig, our_options
from adaecho.errors import ConfigError

_MAX_BATCH = 64
_MAX_BUFFER = 10_000  # examples
_MIN_EPOCHS, _MAX_EPOCHS = 2, 10
_BUDGET = 50_000  # fresh examples: minutes on a CPU for small images
_RATE_PER_EXAMPLE = 0.001  # learning rate 0.03 for batches of 32, as in experiment=caltech101


def scaled(key: str, *, _root_: DictConfig) -> Any:
    """Return the value of the resolver ``${adaecho.scaled:key}``.

    * ``batch_size``: the largest power of two from 4 to 64 with at least 16 batches per epoch.
    * ``shuffle_buffer``: a quarter of an epoch, at most 10,000.
    * ``every_fresh_examples``: half an epoch.
    * ``max_fresh_examples``: 10 epochs, or 50,000 examples if that is less, but at least 2 epochs.
    * ``learning_rate``: 0.001 times the batch size.
    * ``decay_steps``: batches of fresh examples in the budget.
    * ``axes``: a tenth to ten times that learning rate, and momentum.

    An overridden batch size changes the learning rate and ``decay_steps``. An overridden budget below two
    epochs sets the buffer to an eighth and the evaluations to a quarter of it.

    Raises:
        ConfigError: ``data.path`` is not set.
        DataError: the data is missing.
    """
    size = _size(_root_)
    if key == "validation_examples":
        return size.held_out
    rate = _RATE_PER_EXAMPLE * _root_.batch_size if key in ("learning_rate", "axes") else 0.0
    if key == "learning_rate":
        return round(rate, 6)
    if key == "axes":
        rates = f"tag(log, interval({rate / 10:.6g}, {rate * 10:.6g}))"
        return {
            "optimizer.learning_rate": rates,
            "optimizer.momentum": "tag(reverse_log, interval(0.8, 0.99))",
        }
    if key == "decay_steps":
        return max(1, (_root_.max_fresh_examples or size.training * _MAX_EPOCHS) // _root_.batch_size)
    batch = max(4, min(1 << (max(size.training // 16, 1).bit_length() - 1), _MAX_BATCH))
    epochs = max(_MIN_EPOCHS, min(_BUDGET // size.training, _MAX_EPOCHS))
    budget = epochs * max(size.training, batch)
    if key == "batch_size":
        return batch
    if key == "max_fresh_examples":
        return budget
    seen = min(size.training, (_root_.max_fresh_examples or budget) // _MIN_EPOCHS)
    return {
        "shuffle_buffer": max(1, min(seen // 4, _MAX_BUFFER)),
        "every_fresh_examples": max(seen // 2, batch),
    }[key]


def describe(config: DictConfig, plain: dict[str, Any]) -> str:
    """Describe the values that ``scale=`` chose, in one line."""
    size, held_out = _size(config), plain["data"]["validation_examples"]
    of = "images" if size.name == "images" else "documents"
    split = "own validation split" if held_out is None else f"{held_out:,} {of} for validation"
    about = "" if size.units == size.examples else "about "
    return (
        f"scale: {about}{size.training:,} {size.name}, {split}, batch {plain['batch_size']}, "
        f"buffer {plain['echo']['shuffle_buffer']:,}, evaluated every "
        f"{plain['evaluate']['every_fresh_examples']:,}, budget {plain['max_fresh_examples']:,}"
    )


def _size(config: DictConfig) -> Size:
    path = config.data.path
    if path is None:
        raise ConfigError("data.path: missing; give the folder of your data, data.path=FOLDER")
    task = json.dumps(OmegaConf.to_container(config.task), sort_keys=True)
    return _size_at(str(path), task, config.data.max_bad_examples)


@functools.cache  # called for each value of each arm
def _size_at(path: str, task: str, max_bad_examples: int) -> Size:
    plain = json.loads(task)
    return our_options().get(plain["name"], TaskConfig).size_of(path, plain, max_bad_examples)
