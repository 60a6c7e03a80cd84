"""Choose defaults based on the size of the user's data, for ``scale=images`` and ``scale=text``."""

import functools
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adaecho.config.identity import flat
from adaecho.config.tasks import Size, TaskConfig, our_options
from adaecho.errors import ConfigError

_SHOWN = ("batch_size", "echo.shuffle_buffer", "evaluate.every_fresh_examples", "max_fresh_examples")
_MAX_VALIDATION = 1_000
_MAX_BATCH = 64
_MAX_BUFFER = 10_000  # in examples
_MIN_EPOCHS, _MAX_EPOCHS = 2, 10
_BUDGET = 50_000  # in fresh examples; with small images, this takes minutes on a CPU
_RATE_PER_EXAMPLE = 0.001  # at batch size 32, this gives about the 0.03 of experiment=caltech101


def scaled(key: str, *, _root_: DictConfig) -> Any:
    """Return the default value of one setting, computed from the size of the user's dataset.

    The YAML files in ``conf/`` call this function as ``${adaecho.scaled:key}``. The keys and values are:

    * ``validation_examples``: a fifth of the data, at most 1,000; None if the data has a validation split.
    * ``batch_size``: the largest power of two from 4 to 64 with at least 16 batches per epoch.
    * ``shuffle_buffer``: a quarter of an epoch, at most 10,000 examples.
    * ``every_fresh_examples``: half an epoch.
    * ``max_fresh_examples``: 10 epochs, or about 50,000 examples if that is less, but at least 2 epochs.
    * ``learning_rate``: 0.001 times the batch size.
    * ``decay_steps``: ``max_fresh_examples`` divided by the batch size.
    * ``axes``: the search ranges of the learning rate and the momentum.

    If the user's budget is below two epochs, ``shuffle_buffer`` and ``every_fresh_examples`` use half the
    budget in place of an epoch.
    """
    held_out, training = _split(_size(_root_))
    if key == "validation_examples":
        return held_out
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
        return max(1, (_root_.max_fresh_examples or training * _MAX_EPOCHS) // _root_.batch_size)
    batch = max(4, min(1 << (max(training // 16, 1).bit_length() - 1), _MAX_BATCH))
    epochs = max(_MIN_EPOCHS, min(_BUDGET // training, _MAX_EPOCHS))
    budget = epochs * max(training, batch)
    if key == "batch_size":
        return batch
    if key == "max_fresh_examples":
        return budget
    seen = min(training, (_root_.max_fresh_examples or budget) // _MIN_EPOCHS)
    return {
        "shuffle_buffer": max(1, min(seen // 4, _MAX_BUFFER)),
        "every_fresh_examples": max(seen // 2, batch),
    }[key]


def describe(plain: dict[str, Any]) -> str:
    """Return one line of text with the values that ``scale=`` has chosen."""
    values = dict(flat(plain))
    return f"scale: {', '.join(f'{key}={values[key]}' for key in _SHOWN)}"


def _split(size: Size) -> tuple[int | None, int]:
    """Return how many documents or images to hold out, and how many training examples remain."""
    held_out = None if size.has_validation else max(1, min(size.units // 5, _MAX_VALIDATION))
    return held_out, max(1, size.examples - size.examples * (held_out or 0) // size.units)


def _size(config: DictConfig) -> Size:
    if config.data.path is None:
        raise ConfigError("data.path: missing; set it to the folder of your data, data.path=FOLDER")
    task: Any = OmegaConf.to_container(config.task)
    return _size_at(str(config.data.path), tuple(task.items()), config.data.max_bad_examples)


@functools.cache  # it is called for each value of each arm, and reading the data may be slow
def _size_at(path: str, task: tuple[tuple[str, Any], ...], max_bad_examples: int) -> Size:
    plain = dict(task)
    return our_options().get(plain["name"], TaskConfig).size_of(path, plain, max_bad_examples)
