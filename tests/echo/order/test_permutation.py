"""Orders of rows, drawn or computed row by row, or of shards side by side: no row comes twice or never."""

import itertools
from math import isqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from adaecho import EchoLoader
from adaecho.echo.order import keyed, permutation
from adaecho.echo.order.permutation import BLOCK, LEAST_COMPUTED, RUN, Permutation, interleaved, permuted
from adaecho.echo.state import sealed

LONG = 5_000_000_000


def row_of(position: int, length: int, seed: int, number: int) -> int:
    """One row, by the formulas of Black and Rogaway in whole numbers."""
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
def test_rows_are_those_of_the_formula(length: int) -> None:
    positions = np.unique(np.linspace(0, length - 1, 20).astype(np.int64).clip(0, length - 1))
    found = permuted(positions, length, -3, 2)
    assert found.tolist() == [row_of(int(position), length, -3, 2) for position in positions]


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 1000, 4095, 4096, 4097])
def test_every_row_comes_once(length: int) -> None:
    for number in range(3):
        found = permuted(np.arange(length), length, 7, number)
        assert sorted(found.tolist()) == list(range(length))


def test_every_row_of_a_long_source_comes_once() -> None:
    seen = np.zeros(LEAST_COMPUTED, dtype=bool)
    order = Permutation(LEAST_COMPUTED, "permutation", seed=1)
    for first in range(0, LEAST_COMPUTED, 1 << 20):
        seen[order._of_serials(np.arange(first, first + (1 << 20)))] = True
    assert seen.all()


def chi_square(counts: NDArray[np.int64]) -> float:
    """The statistic's distance from its mean in standard deviations, for counts that should be equal."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = counts.size - 1
    return float((statistic - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("length", [1009, LEAST_COMPUTED, LONG])
def test_places_are_uniform_over_keys(length: int) -> None:
    """Where each of a few positions goes, over passes; and where two neighbours go together."""
    passes = 4000
    positions = np.array([0, 1, length // 2, length - 1])
    rows = np.array([permuted(positions, length, 11, number) for number in range(passes)])
    cells = rows * 20 // length  # [passes, positions]: in which twentieth of the source
    for column in cells.T:
        assert chi_square(np.bincount(column, minlength=20)) < 5
    for one, two in itertools.combinations(cells.T, 2):
        pairs = np.bincount(one // 2 * 10 + two // 2, minlength=100)
        assert chi_square(pairs) < 5


@pytest.mark.parametrize("length", [100_003, LEAST_COMPUTED, LONG])
def test_neighbours_are_uniform_within_a_pass(length: int) -> None:
    """Each row alone, with its neighbour's, their difference, and with the same place's in other orders."""
    positions = np.arange(100_000)
    rows = permuted(positions, length, 5, 0)
    cells = rows * 32 // length
    assert chi_square(np.bincount(cells, minlength=32)) < 5
    for distance in (1, 2, isqrt(length - 1) + 1):  # the last: one side of the network stays, the other rises
        later = permuted((positions + distance) % length, length, 5, 0)
        assert chi_square(np.bincount(cells * 32 + later * 32 // length, minlength=1024)) < 5
        gaps = (later - rows) % length * 64 // length
        assert chi_square(np.bincount(gaps, minlength=64)) < 5
    again = permuted(positions, length, 5, 1)
    other_seed = permuted(positions, length, 6, 0)
    for other in (again, other_seed):
        assert chi_square(np.bincount(cells * 32 + other * 32 // length, minlength=1024)) < 5
        assert abs(np.corrcoef(rows, other)[0, 1]) < 0.02


def test_fixed_points_and_inversions_are_as_many_as_by_chance() -> None:
    length, passes = 200, 3000
    rows = np.array([permuted(np.arange(length), length, 3, number) for number in range(passes)])
    fixed = (rows == np.arange(length)).sum(1)  # Poisson of mean 1
    assert abs(fixed.mean() - 1) < 5 / np.sqrt(passes)
    assert abs(fixed.var() - 1) < 0.25
    descents = (np.diff(rows) < 0).sum(1)  # mean (n - 1) / 2, variance (n + 1) / 12
    assert abs(descents.mean() - (length - 1) / 2) < 5 * np.sqrt((length + 1) / 12 / passes)
    assert descents.var() == pytest.approx((length + 1) / 12, rel=0.2)


@pytest.mark.parametrize(("world", "passes", "drop_last"), [(1, None, False), (3, 2, False), (3, 2, True)])
def test_blocks_give_what_single_serials_give(
    world: int, passes: int | None, drop_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permutation, "LEAST_COMPUTED", 1)
    length = 10_007
    order, alone = (
        Permutation(length, "permutation", 4, passes=passes, world=world, drop_last=drop_last)
        for _ in range(2)
    )
    assert order.method == "computed"
    rng = np.random.default_rng(0)
    index = 0
    while index * world < 5 * length:
        count = int(rng.integers(0, 700))
        serials = np.arange(index, index + count) * world + world - 1
        found = order.rows(serials)
        assert found.tolist() == alone._of_serials(serials).tolist()
        if count > 300:  # as a resume asks
            chosen = np.sort(rng.choice(serials, 5, replace=False))
            assert order.rows(chosen).tolist() == alone._of_serials(chosen).tolist()
            assert order.rows(chosen[:1])[0] == alone._of_serials(chosen[:1])[0]
        index += count
    assert len(order.rows(np.arange(3 * BLOCK))) == 3 * BLOCK


def test_short_sources_keep_the_orders_that_runs_have_recorded() -> None:
    order = Permutation(10, "permutation", 0)
    rng = np.random.Generator(np.random.Philox(key=np.array([0, 1], dtype=np.uint64)))
    assert order.rows(np.arange(10, 20)).tolist() == rng.permutation(np.arange(10, dtype=np.uint32)).tolist()
    assert Permutation(LEAST_COMPUTED - 1, "permutation", 0).method == "drawn"
    assert Permutation(LEAST_COMPUTED, "stored", 0).method == "drawn"
    assert Permutation(LEAST_COMPUTED, "shards", 0, np.array([LEAST_COMPUTED])).method == "drawn"


def test_shards_come_whole_in_the_order_that_was_drawn_from_rows() -> None:
    lengths = np.array([5, 0, 3, 7, 1, 4])
    order = Permutation(20, "shards", 9, lengths)
    for number in range(4):
        rng = np.random.Generator(np.random.Philox(key=np.array([9, number], dtype=np.uint64)))
        shards = np.split(np.arange(20), np.cumsum(lengths)[:-1])
        expected = np.concatenate([shards[shard] for shard in rng.permutation(6)])
        assert order.rows(np.arange(20) + 20 * number).tolist() == expected.tolist()


class Numbers:
    """As long as is wished, without an example in memory."""

    thread_safe = True

    def __init__(self, length: int, shard_lengths: NDArray[np.int64] | None = None) -> None:
        self.length = length
        if shard_lengths is not None:
            self.shard_lengths = shard_lengths

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> dict[str, int]:
        return {"row": row}


def loader(length: int, **arguments: object) -> EchoLoader:
    return EchoLoader(
        Numbers(length), 8, echo="example_before_augmentation", factor=2, shuffle_buffer=20, **arguments
    )


def batches(of: EchoLoader, count: int) -> list[list[int]]:
    return [batch["row"].tolist() for batch in itertools.islice(of, count)]


def test_shards_of_five_thousand_million_rows() -> None:
    source = Numbers(LONG, np.full(5000, 1_000_000))
    with EchoLoader(source, 8, order="shards") as shards:
        (batch,) = batches(shards, 1)
    assert np.diff(batch).tolist() == [1] * 7
    assert batch[0] % 1_000_000 == 0


def test_a_state_of_a_long_source_says_its_permutation_and_another_is_refused() -> None:
    with loader(LEAST_COMPUTED) as long, loader(LEAST_COMPUTED - 1) as short:
        batches(long, 1), batches(short, 1)
        assert short.state_dict()["permutation"] == "drawn"
        old = sealed({**long.state_dict(), "permutation": "drawn"})
        with pytest.raises(
            ValueError, match=r"permutation of the state's 4194304 examples is drawn, .* is computed"
        ):
            long.load_state_dict(old)


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
