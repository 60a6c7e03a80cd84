"""Holding out a validation split."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.errors import ConfigError, DataError

Arrays = dict[str, NDArray[Any]]


class Rows:
    """Map-style subset of a dataset that need not fit in memory.

    Args:
        dataset: indexable.
        rows: int64 [n], which of its examples.
    """

    def __init__(self, dataset: Any, rows: NDArray[np.int64]) -> None:
        self.dataset, self.rows = dataset, rows
        self.thread_safe = bool(getattr(dataset, "thread_safe", False))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[int(self.rows[row])]

    def origin(self, row: int) -> str:
        """What to call an example in a message."""
        return str(self.dataset.origin(int(self.rows[row])))


def hold_out(examples: Arrays, num_validation: int | None, *, seed: int) -> tuple[Arrays, Arrays]:
    """Split arrays into training and validation examples by a seeded permutation.

    Args:
        examples: arrays of one length N.
        num_validation: 1 <= num_validation < N.
        seed: of the permutation, ``numpy.random.default_rng(seed).permutation(N)``.

    Raises:
        DataError: nothing would be left to train on.
    """
    kept, held_out = hold_out_rows(len(next(iter(examples.values()))), num_validation, seed=seed)
    training, validation = (
        {name: array[rows] for name, array in examples.items()} for rows in (kept, held_out)
    )
    return training, validation


def hold_out_rows(
    number: int, num_validation: int | None, *, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row numbers of the split that ``hold_out`` makes, for use with ``Rows``.

    Raises:
        DataError: nothing would be left to train on, or it isn't said how many to hold out.
    """
    if num_validation is None:
        raise DataError(
            "data.validation_examples=null: this data has no validation split of its own; say how many of "
            f"the {number} training examples to hold out"
        )
    if num_validation >= number:
        raise DataError(
            f"data.validation_examples={num_validation}: the training files hold {number} examples, so none "
            "would be left to train on; hold out fewer"
        )
    rows = np.random.default_rng(seed).permutation(number)
    return rows[:-num_validation], rows[-num_validation:]


def refuse_number(number: int | None, path: str) -> None:
    """Raises ConfigError where it is said how many to hold out of data that has a validation split."""
    if number is not None:
        raise ConfigError(
            f"data.validation_examples={number}: {path} has a validation split of its own; leave it null "
            "(evaluate.max_examples takes a part of it)"
        )


def first_of(examples: Arrays, number: int | None) -> Arrays:
    """The first ``number`` examples (None: all), for a smaller training set.

    Raises:
        ConfigError: there are fewer.
    """
    available = len(next(iter(examples.values())))
    if number is not None and number > available:
        raise ConfigError(
            f"task.training_examples={number}: {available} are left after holding out; give fewer, or null"
        )
    return {name: array[:number] for name, array in examples.items()}
