"""Holding out a validation split, and which part of a data set a name says."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.errors import ConfigError, DataError

Arrays = dict[str, NDArray[Any]]

_WORDS = {  # of names in lower case
    "train": "train|training",
    "validation": "validation|valid|val|dev|devel|development|eval|evaluation|held[-_ ]?out|hold[-_ ]?out",
    "test": "test|testing",
}
_KINDS = "([-_ ]?(set|data|split))?"


def named_part(name: str) -> str:
    """The part that a name as a whole says, in lower case, else "": ``train``, ``test_set``, ``training``."""
    found = (part for part, words in _WORDS.items() if re.fullmatch(f"({words}){_KINDS}", name))
    return next(found, "")


def part_in(name: str) -> str:
    """The part that a word of a name says, in lower case, else "": ``wiki_val.txt``; training comes first."""
    words = ((part, rf"(?<![a-z])({words}){_KINDS}(?![a-z])") for part, words in _WORDS.items())
    return next((part for part, pattern in words if re.search(pattern, name)), "")


class Rows:
    """Map-style: some rows of a dataset that need not fit in memory.

    Args:
        dataset: indexable.
        rows: int64 [n], which of its examples; ascending where the dataset's shards are to be kept together.

    Attributes:
        thread_safe: whether the dataset says that it is.
        shard_lengths: how many of the rows lie in each of the dataset's shards; None where it has none.
    """

    def __init__(self, dataset: Any, rows: NDArray[np.int64]) -> None:
        self.dataset, self.rows = dataset, rows
        self.thread_safe = bool(getattr(dataset, "thread_safe", False))
        lengths = getattr(dataset, "shard_lengths", None)
        self.shard_lengths = None if lengths is None or (np.diff(rows) < 0).any() else _counts(lengths, rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[int(self.rows[row])]

    def identity(self, row: int) -> str:
        """What tells an example from others, wherever the dataset lies, if it knows."""
        of_dataset, at = getattr(self.dataset, "identity", str), int(self.rows[row])
        return str(of_dataset(at))

    def origin(self, row: int) -> str:
        """What to call an example in a message."""
        of_dataset = getattr(self.dataset, "origin", None)
        at = int(self.rows[row])
        return str(of_dataset(at)) if of_dataset is not None else f"example {at}"


def hold_out(examples: Arrays, num_validation: int | None, *, seed: int) -> tuple[Arrays, Arrays]:
    """Training and validation examples: a fixed permutation's head and its last ``num_validation`` rows.

    Args:
        examples: arrays of one length N.
        num_validation: 1 <= num_validation < N.
        seed: of the permutation, ``numpy.random.default_rng(seed).permutation(N)``.

    Raises:
        DataError: nothing would be left to train on.
    """
    kept, held_out = hold_out_rows(len(next(iter(examples.values()))), num_validation, seed=seed)
    return _take(examples, kept), _take(examples, held_out)


def hold_out_rows(
    number: int, num_validation: int | None, *, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The row numbers of ``hold_out``, for ``Rows`` of a dataset of this length.

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


def _counts(lengths: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    shards = np.searchsorted(np.cumsum(lengths), rows, side="right")
    return np.unique(shards, return_counts=True)[1]


def _take(examples: Arrays, rows: NDArray[np.int64]) -> Arrays:
    return {name: array[rows] for name, array in examples.items()}
