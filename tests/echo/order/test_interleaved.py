"""Shards side by side: a bijection, near one another in runs, and mixed from the first batch to the last."""

import numpy as np
import pytest

from adaecho.echo.order.permutation import RUN, Permutation, interleaved


@pytest.mark.parametrize("places", [1, 2, 7, 8, 64])
@pytest.mark.parametrize("length", [1, 55, 63, 64, 65, 1200, 4097])
def test_every_example_comes_once(length: int, places: int) -> None:
    positions = np.arange(length)
    found = interleaved(positions, length, places, 5, 0)
    assert sorted(found.tolist()) == positions.tolist()
    shuffled = np.random.default_rng(0).permutation(length)
    assert interleaved(shuffled, length, places, 5, 0).tolist() == found[shuffled].tolist()
    if length >= 1200:
        assert (found == positions).all() == (places == 1)


def test_runs_are_neighbours_and_each_stretch_goes_on_where_it_was() -> None:
    found = interleaved(np.arange(4800), 4800, 8, -3, 4)
    runs = found[: 4800 - 4800 % (8 * RUN)].reshape(-1, RUN)
    assert (np.diff(runs) == 1).all()
    firsts = runs[:, 0].reshape(-1, 8)  # of each time around
    assert (np.diff(np.sort(firsts, axis=1), axis=0) == RUN).all()
    assert len({tuple(order) for order in np.argsort(firsts, axis=1).tolist()}) > 4


def test_the_draws_follow_seed_and_pass() -> None:
    orders = [
        interleaved(np.arange(1200), 1200, 8, *key).tolist() for key in ((1, 0), (1, 1), (2, 0), (1, 0))
    ]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("shard", [100, 150, 2000])
def test_every_128_examples_are_of_all_eight_shards(shard: int) -> None:
    shards = interleaved(np.arange(8 * shard), 8 * shard, 8, 0, 0) // shard
    for first in range(0, 8 * shard - 127, 128):
        assert set(shards[first : first + 128].tolist()) == set(range(8))


def test_five_thousand_million_examples_are_computed_one_by_one() -> None:
    length = 5_000_000_001
    positions = np.concatenate([np.arange(64), np.arange(length - 64, length)])
    found = interleaved(positions, length, 8, 0, 0)
    assert len(set(found.tolist())) == 128
    assert 0 <= found.min() < found.max() < length


def test_a_pass_reads_shards_side_by_side_and_each_through() -> None:
    lengths = np.full(8, 100)
    rows = Permutation(800, "shards", 3, lengths, 8).rows(np.arange(1600))
    assert sorted(rows[:800].tolist()) == list(range(800))
    assert rows[:800].tolist() != rows[800:].tolist()
    assert len(set((rows[:164] // 100).tolist())) == 8
    one_by_one = Permutation(800, "shards", 3, lengths).rows(np.arange(800))
    assert one_by_one.tolist() == Permutation(800, "shards", 3, lengths, 1).rows(np.arange(800)).tolist()
    assert len(set((one_by_one[:164] // 100).tolist())) == 2
