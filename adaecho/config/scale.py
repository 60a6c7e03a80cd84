"""``scale=images`` and ``scale=text``: split, batch, buffer, evaluation and budget from the size of the data.

The paper's values are for a million images; on some hundred they ask for an evaluation beyond the end and a
buffer that reads the data a hundred times before the first step.
"""

import functools
import json
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adaecho.config.tasks import Size, TaskConfig, our_options
from adaecho.errors import ConfigError

_LARGEST_BATCH = 64
_LARGEST_BUFFER = 10_000  # examples
_FEW_PASSES, _MANY_PASSES = 2, 10
_BUDGET = 50_000  # fresh examples, within these passes: minutes of a CPU on small images
_RATE_PER_EXAMPLE = 0.001  # of a batch: 0.03 for 32 images, as in experiment=caltech101


def scaled(key: str, *, _root_: DictConfig) -> Any:
    """What the resolver ``${adaecho.scaled:key}`` gives.

    ``batch_size``: the largest power of two of which a pass has 16, from 4 to 64. ``shuffle_buffer``: a
    quarter of a pass, at most 10,000. ``every_fresh_examples``: half a pass. ``max_fresh_examples``: 10
    passes, of more than 5,000 examples as many as 50,000 are, at least 2. ``learning_rate``: 0.001 an example
    of the batch. ``decay_steps``: batches of fresh examples in the budget. The last two follow a batch size
    or a budget that was typed, and below two passes buffer and evaluations are an eighth and a quarter of it.
    ``axes``: of a search, a tenth to ten times that rate, and momentum; the decay is the budget's.

    Raises:
        ConfigError: ``data.path`` is not set.
        DataError: there is no such data.
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
        return max(1, (_root_.max_fresh_examples or size.training * _MANY_PASSES) // _root_.batch_size)
    batch = max(4, min(1 << (max(size.training // 16, 1).bit_length() - 1), _LARGEST_BATCH))
    passes = max(_FEW_PASSES, min(_BUDGET // size.training, _MANY_PASSES))
    budget = passes * max(size.training, batch)
    if key == "batch_size":
        return batch
    if key == "max_fresh_examples":
        return budget
    seen = min(size.training, (_root_.max_fresh_examples or budget) // _FEW_PASSES)
    return {
        "shuffle_buffer": max(1, min(seen // 4, _LARGEST_BUFFER)),
        "every_fresh_examples": max(seen // 2, batch),
    }[key]


def told(config: DictConfig, plain: dict[str, Any]) -> str:
    """What a scaled config is, in one line.

    Args:
        config: as Hydra composed it.
        plain: its values.
    """
    size, held_out = _size(config), plain["data"]["validation_examples"]
    of = "images" if size.name == "images" else "documents"
    split = "its own validation split" if held_out is None else f"{held_out:,} {of} held out"
    about = "" if size.units == size.examples else "about "
    return (
        f"scale: {about}{size.training:,} {size.name}, {split}, batch {plain['batch_size']}, "
        f"buffer {plain['echo']['shuffle_buffer']:,}, evaluated every "
        f"{plain['evaluate']['every_fresh_examples']:,}, budget {plain['max_fresh_examples']:,}"
    )


def _size(config: DictConfig) -> Size:
    path = config.data.path
    if path is None:
        raise ConfigError("data.path: is missing; name the folder of your data, data.path=FOLDER")
    task = json.dumps(OmegaConf.to_container(config.task), sort_keys=True)
    return _size_at(str(path), task, config.data.max_bad_examples)


@functools.cache  # asked for each value of each arm
def _size_at(path: str, task: str, max_bad_examples: int) -> Size:
    plain = json.loads(task)
    return our_options().get(plain["name"], TaskConfig).size_of(path, plain, max_bad_examples)
