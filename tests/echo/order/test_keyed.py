"""Generators for one key are those of NumPy, made with less work."""

import copy
import pickle

import numpy as np
import pytest

from adaecho.echo.order import keyed


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_a_generator_is_philox_of_its_key(key: int) -> None:
    ours, numpy = keyed.generator(np.uint64(key)), np.random.Generator(np.random.Philox(key=key))
    assert np.array_equal(ours.integers(0, 2**63, 100), numpy.integers(0, 2**63, 100))
    assert np.array_equal(ours.normal(size=101), numpy.normal(size=101))


def test_what_it_spawns_follows_from_its_key() -> None:
    first, again, other = (keyed.generator(key) for key in (7, 7, 8))
    drawn = [[child.random() for child in rng.spawn(2) + rng.spawn(1)] for rng in (first, again, other)]
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2]}) == 6


def test_copies_go_on_where_it_is() -> None:
    rng = keyed.generator(3)
    rng.random(5)
    copies = [copy.deepcopy(rng), pickle.loads(pickle.dumps(rng))]
    expected = rng.random(5)
    for one in copies:
        assert np.array_equal(one.random(5), expected)
