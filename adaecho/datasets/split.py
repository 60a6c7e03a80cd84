"""Split a dataset into training and validation examples."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.errors import ConfigError, DataError

Arrays = dict[str, NDArray[Any]]


class Subset:
    """A map-style dataset with a subset of the examples of another map-style dataset.

    Examples are read from the other dataset on demand, so that dataset may be larger than memory.

    Args:
        dataset: a map-style dataset.
        rows: int64 [n], indices of the examples in ``dataset``.
    """

    def __init__(self, dataset: Any, rows: NDArray[np.int64]) -> None:
        self.dataset, self.rows = dataset, rows
        self.thread_safe = bool(getattr(dataset, "thread_safe", False))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[int(self.rows[row])]

    def origin(self, row: int) -> str:
        """Return the name of an example, for messages."""
        return str(self.dataset.origin(int(self.rows[row])))


def train_validation_split(
    examples: Arrays, num_validation: int | None, *, seed: int
) -> tuple[Arrays, Arrays]:
    """Split arrays into training and validation examples by a seeded permutation.

    Args:
        examples: arrays of the same length N.
        num_validation: number of validation examples, 1 <= num_validation < N.
        seed: seed of the permutation, ``numpy.random.default_rng(seed).permutation(N)``.

    Returns:
        The training examples, and the validation examples.

    Raises:
        DataError: ``num_validation`` is None, or no training example would be left.
    """
    splits = split_indices(len(next(iter(examples.values()))), num_validation, seed=seed)
    train, validation = ({name: array[rows] for name, array in examples.items()} for rows in splits)
    return train, validation


def split_indices(
    number: int, num_validation: int | None, *, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the training and of the validation examples, for ``Subset``.

    Raises:
        DataError: ``num_validation`` is None, or no training example would be left.
    """
    if num_validation is None or num_validation >= number:
        asked = "null" if num_validation is None else num_validation
        raise DataError(
            f"data.validation_examples={asked}: this data has no validation split; set how many of its "
            f"{number} training examples to hold out, fewer than all"
        )
    rows = np.random.default_rng(seed).permutation(number)
    return rows[:-num_validation], rows[-num_validation:]


def refuse_number(number: int | None, path: str) -> None:
    """Raise a ConfigError if ``data.validation_examples`` is set, since the data has a validation split."""
    if number is not None:
        raise ConfigError(
            f"data.validation_examples={number}: {path} has a validation split; leave the key null "
            "(evaluate.max_examples evaluates on a part of the split)"
        )


def first_of(examples: Arrays, number: int | None) -> Arrays:
    """Return the first ``number`` examples, or all examples if ``number`` is None."""
    available = len(next(iter(examples.values())))
    if number is not None and number > available:
        raise ConfigError(
            f"task.training_examples={number}: only {available} training examples are left after holding "
            "out the validation split; set fewer, or null"
        )
    return {name: array[:number] for name, array in examples.items()}
