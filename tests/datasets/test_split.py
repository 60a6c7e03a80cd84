"""Splits are complete, keep labels with their images, and depend on the seed alone."""

import numpy as np
import pytest

from adaecho.datasets.split import Subset, split_indices, train_validation_split
from adaecho.errors import DataError


def _examples(number: int) -> dict[str, np.ndarray]:
    return {"image": np.arange(number) * 10, "label": np.arange(number)}


def test_every_example_is_on_one_side_with_its_own_label() -> None:
    training, validation = train_validation_split(_examples(20), 6, seed=0)
    assert len(validation["label"]) == 6
    labels = np.concatenate([training["label"], validation["label"]])
    assert sorted(labels) == list(range(20))
    images = np.concatenate([training["image"], validation["image"]])
    np.testing.assert_array_equal(images, labels * 10)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (20, r"data\.validation_examples=20: .* of its 20 training examples"),
        (None, r"data\.validation_examples=null: .* of its 20 training examples"),
    ],
)
def test_wrong_numbers_are_refused(number: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        train_validation_split(_examples(20), number, seed=0)


def test_rows_are_a_view_of_the_same_split() -> None:
    kept, held_out = split_indices(20, 6, seed=0)
    training, validation = train_validation_split(_examples(20), 6, seed=0)
    view = Subset([{"label": number} for number in range(20)], held_out)
    assert [view[row]["label"] for row in range(len(view))] == validation["label"].tolist()
    assert kept.tolist() == training["label"].tolist()


def test_rows_inherit_thread_safe() -> None:
    class Safe(list[int]):
        thread_safe = True

    assert Subset(Safe(range(10)), np.array([0, 2])).thread_safe
    assert not Subset(list(range(10)), np.array([0, 2])).thread_safe
