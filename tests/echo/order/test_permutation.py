"""Permutations of rows and shards, keyed generators, repeats, and the shuffle buffer."""

import itertools
from math import isqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from adaecho import EchoLoader
from adaecho.echo.order import keyed, permutation
from adaecho.echo.order.permutation import BLOCK, LEAST_COMPUTED, Permutation, permuted
from adaecho.echo.order.stream import repeats

LONG = 5_000_000_000


def row_of(position: int, length: int, seed: int, number: int) -> int:
    """One row of the permutation by the formulas of Black and Rogaway, in plain integers."""
    key = keyed.item_keys(seed, np.array([number << keyed.ECHO_BITS]))
    keys = [int(keyed.bits(key, keyed.STAGE_PURPOSES + 3 + turn)[0]) for turn in range(6)]
    a = next(a for a in itertools.count(max(isqrt(length) - 1, 1)) if a * a >= length)
    b = -(-length // a)
    row = position
    while True:
        size, other = a, b
        left, right = row // other, row % other
        for own in keys:
            hashed = int(keyed.bits(np.array([(right + own) % 2**64], dtype=np.uint64), 0)[0])
            left, right = right, (left + ((hashed >> 11) * size >> 53)) % size
            size, other = other, size
        row = left * other + right
        if row < length:
            return row


@pytest.mark.parametrize("length", [1, 2, 3, 10, 257, LEAST_COMPUTED, LONG, 2**61 - 1])
def test_rows_equal_the_formula(length: int) -> None:
    positions = np.unique(np.linspace(0, length - 1, 20).astype(np.int64).clip(0, length - 1))
    found = permuted(positions, length, -3, 2)
    assert found.tolist() == [row_of(int(position), length, -3, 2) for position in positions]


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 1000, 4095, 4096, 4097, LEAST_COMPUTED])
def test_every_row_occurs_once(length: int) -> None:
    for number in range(3 if length < LEAST_COMPUTED else 1):
        found = permuted(np.arange(length), length, 7, number)
        assert (np.bincount(found, minlength=length) == 1).all()


def chi_square(counts: NDArray[np.int64]) -> float:
    """Chi-square of equal counts: distance from its mean in standard deviations."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = counts.size - 1
    return float((statistic - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("length", [1009, LEAST_COMPUTED, LONG])
def test_positions_are_uniform_over_epochs(length: int) -> None:
    """Check rows of four positions and of their pairs over epochs."""
    passes = 4000
    positions = np.array([0, 1, length // 2, length - 1])
    rows = np.array([permuted(positions, length, 11, number) for number in range(passes)])
    cells = rows * 20 // length  # [epochs, positions]: which twentieth of the source
    for column in cells.T:
        assert chi_square(np.bincount(column, minlength=20)) < 5
    for one, two in itertools.combinations(cells.T, 2):
        pairs = np.bincount(one // 2 * 10 + two // 2, minlength=100)
        assert chi_square(pairs) < 5


@pytest.mark.parametrize("length", [100_003, LEAST_COMPUTED, LONG])
def test_neighbors_are_uniform_within_an_epoch(length: int) -> None:
    """Check each row, pairs of neighbors, their differences, and pairs from two orders."""
    positions = np.arange(100_000)
    rows = permuted(positions, length, 5, 0)
    cells = rows * 32 // length
    assert chi_square(np.bincount(cells, minlength=32)) < 5

    def pairs(other: NDArray[np.int64]) -> float:
        return chi_square(np.bincount(cells * 32 + other * 32 // length, minlength=1024))

    for distance in (
        1,
        2,
        isqrt(length - 1) + 1,
    ):  # the last changes one half of the Feistel network
        later = permuted((positions + distance) % length, length, 5, 0)
        assert pairs(later) < 5
        assert chi_square(np.bincount((later - rows) % length * 64 // length, minlength=64)) < 5
    for seed, number in ((5, 1), (6, 0)):
        other = permuted(positions, length, seed, number)
        assert pairs(other) < 5
        assert abs(np.corrcoef(rows, other)[0, 1]) < 0.02


@pytest.mark.parametrize(("world", "passes", "drop_last"), [(1, None, False), (3, 2, False), (3, 2, True)])
def test_blocks_equal_single_serials(
    world: int, passes: int | None, drop_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permutation, "LEAST_COMPUTED", 1)
    length, rng, index = 10_007, np.random.default_rng(0), 0
    order, alone = (
        Permutation(length, "permutation", 4, passes=passes, world=world, drop_last=drop_last)
        for _ in range(2)
    )
    assert order.method == "computed"
    while index * world < 5 * length:
        count = int(rng.integers(0, 700))
        serials = np.arange(index, index + count) * world + world - 1
        asked = [serials]
        if count > 300:  # like the requests of a resume
            asked += [np.sort(rng.choice(serials, 5, replace=False)), serials[7:8]]
        for some in asked:
            assert order.rows(some).tolist() == alone._of_serials(some).tolist()
        index += count
    assert len(order.rows(np.arange(3 * BLOCK))) == 3 * BLOCK


def test_shards_are_read_in_random_order_and_sequentially_within() -> None:
    order = Permutation(800, "shards", 3, np.full(8, 100))
    rows = order.rows(np.arange(1600))
    assert sorted(rows[:800].tolist()) == list(range(800))
    assert rows[:800].tolist() != rows[800:].tolist()
    assert (rows.reshape(16, 100) - rows[::100, None] == np.arange(100)).all()
    first = Permutation(LONG, "shards", 0, np.full(5000, 1_000_000)).rows(np.arange(8))
    assert (first - first[0]).tolist() == list(range(8))
    assert first[0] % 1_000_000 == 0


def test_fractional_repeats_are_bernoulli_and_independent() -> None:
    extra = repeats(7, np.arange(200_000), 2.3) - 2
    # Five standard deviations of the mean and of the lag-1 correlation
    assert extra.mean() == pytest.approx(0.3, abs=5 * np.sqrt(0.21 / 200_000))
    assert np.corrcoef(extra[1:], extra[:-1])[0, 1] == pytest.approx(0, abs=5 / np.sqrt(200_000))
    assert set(np.unique(extra)) == {0, 1}


def test_the_leaving_slot_is_uniform() -> None:
    """The delay in a buffer of B slots is geometric with mean B."""
    size = 20
    loader = EchoLoader({"x": np.arange(60_000)}, 60_000, shuffle_buffer=size, order="sequential", epochs=1)
    (batch,) = loader
    positions = np.empty(60_000)
    positions[batch["x"].numpy()] = np.arange(60_000)
    delay = positions + size - np.arange(60_000)
    inner = delay[: 60_000 - 20 * size]
    assert inner.min() >= 1
    assert inner.mean() == pytest.approx(size, rel=0.03)
    assert (inner == 1).mean() == pytest.approx(1 / size, rel=0.1)
