"""Draws by keys: generators are those of NumPy, made with less work; repeats and slots are uniform."""

import copy
import pickle

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.order import keyed
from adaecho.echo.order.factor import repeats


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


def test_fractional_repeats_are_bernoulli_and_independent() -> None:
    extra = repeats(7, np.arange(200_000), 2.3) - 2
    # Five standard deviations of the mean and of a lag-1 correlation.
    assert extra.mean() == pytest.approx(0.3, abs=5 * np.sqrt(0.21 / 200_000))
    assert np.corrcoef(extra[1:], extra[:-1])[0, 1] == pytest.approx(0, abs=5 / np.sqrt(200_000))
    assert set(np.unique(extra)) == {0, 1}


def test_the_leaving_slot_is_uniform() -> None:
    """The delay in a true buffer of B slots is geometric with mean B."""
    size = 20
    loader = EchoLoader({"x": np.arange(60_000)}, 60_000, shuffle_buffer=size, order="stored", epochs=1)
    (batch,) = loader
    positions = np.empty(60_000)
    positions[batch["x"].numpy()] = np.arange(60_000)
    delay = positions + size - np.arange(60_000)
    inner = delay[: 60_000 - 20 * size]
    assert inner.min() >= 1
    assert inner.mean() == pytest.approx(size, rel=0.03)
    assert (inner == 1).mean() == pytest.approx(1 / size, rel=0.1)
