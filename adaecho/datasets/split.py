"""Holding out a validation split."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.errors import DataError

Arrays = dict[str, NDArray[Any]]


def hold_out(examples: Arrays, num_validation: int, *, seed: int) -> tuple[Arrays, Arrays]:
    """Training and validation examples: a fixed permutation's head and its last ``num_validation`` rows.

    Args:
        examples: arrays of one length N.
        num_validation: 1 <= num_validation < N.
        seed: of the permutation, ``numpy.random.default_rng(seed).permutation(N)``.

    Raises:
        DataError: nothing would be left to train on.
    """
    number = len(next(iter(examples.values())))
    if num_validation >= number:
        raise DataError(
            f"data.validation_examples={num_validation}: the training files hold {number} examples, so none "
            "would be left to train on; hold out fewer"
        )
    rows = np.random.default_rng(seed).permutation(number)
    kept, held_out = rows[:-num_validation], rows[-num_validation:]
    return _take(examples, kept), _take(examples, held_out)


def _take(examples: Arrays, rows: NDArray[np.int64]) -> Arrays:
    return {name: array[rows] for name, array in examples.items()}
