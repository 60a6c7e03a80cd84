"""The split loses nothing, mixes nothing, and is fixed by its seed."""

import numpy as np
import pytest

from adaecho.datasets.split import hold_out
from adaecho.errors import DataError


def _examples(number: int) -> dict[str, np.ndarray]:
    return {"image": np.arange(number) * 10, "label": np.arange(number)}


def test_every_example_is_on_one_side_with_its_own_label() -> None:
    training, validation = hold_out(_examples(20), 6, seed=0)
    assert len(validation["label"]) == 6
    labels = np.concatenate([training["label"], validation["label"]])
    assert sorted(labels) == list(range(20))
    images = np.concatenate([training["image"], validation["image"]])
    np.testing.assert_array_equal(images, labels * 10)


def test_the_seed_alone_decides_the_split() -> None:
    one, same, other = (hold_out(_examples(100), 30, seed=seed)[1]["label"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert set(one) != set(other)


@pytest.mark.parametrize("too_many", [20, 21])
def test_nothing_left_to_train_on(too_many: int) -> None:
    with pytest.raises(DataError, match=rf"data.validation_examples={too_many}: the training files hold 20"):
        hold_out(_examples(20), too_many, seed=0)
