"""A state is a place and a log: it goes on under other factors and ranks; a refused one breaks nothing."""

import pickle
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from torch.utils.data import SequentialSampler

from adaecho import EchoLoader
from tests.echo.sources import Bad, Dataset, Halting, Stream, arrays, example, labels


@pytest.mark.parametrize("echo", ["example_before_augmentation", "example_after_augmentation", "batch"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_goes_on_under_another_factor(echo: str, num_workers: int) -> None:
    common: dict[str, Any] = {"echo": echo, "shuffle_buffer": 7, "epochs": 1, "num_workers": num_workers}
    with EchoLoader(Dataset(60), 4, factor=2, **common) as loader:
        first = labels(loader, 6)
        fresh, state = loader.fresh_examples, loader.state_dict()
    with EchoLoader(Dataset(60), 4, factor=3, **common) as other:
        other.load_state_dict(state)
        rest = labels(other)
        assert other.factor == 3
        assert other.factor_changes[-1][1] == 3
        assert other.fresh_examples == 60
    uses = Counter(label for batch in first + rest for label in batch)
    assert sorted(uses) == list(range(60))
    assert set(uses.values()) == {2, 3}
    # What had been read under the old factor comes twice; whatever is read later three times.
    twice = sum(number == 2 for number in uses.values())
    if echo == "batch":
        assert twice == 12  # three batches had been made
    else:
        assert fresh - 1 <= twice <= fresh


def test_a_factor_that_changed_goes_into_the_next_state() -> None:
    loader, changed, again = (
        EchoLoader(Dataset(50), 4, factor=factor, echo="example_before_augmentation", shuffle_buffer=9)
        for factor in (2, 1.5, 1.5)
    )
    labels(loader, 5)
    changed.load_state_dict(loader.state_dict())
    labels(changed, 5)
    again.load_state_dict(changed.state_dict())
    assert again.factor_changes == changed.factor_changes
    assert labels(again, 20) == labels(changed, 20)


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 5}, {"shuffle_buffer": 0}, {"echo": "batch", "factor": 3, "batch_shuffle_buffer": 4},
        {"echo": "example_after_augmentation", "factor": 2}, {"echo": "none", "factor": 1},
    ],
    ids=str,
)  # fmt: skip
def test_between_iterations_nothing_is_held(changes: dict[str, Any], after: int) -> None:
    given: dict[str, Any] = {
        "batch_size": 4, "echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 7, "epochs": 1,
    }  # fmt: skip
    loader = EchoLoader(Dataset(30), **given)
    for _ in range(after):
        labels(loader)
    other = EchoLoader(Dataset(30), **{**given, **changes})
    other.load_state_dict(loader.state_dict())
    for number in (1, 2):
        uses = Counter(label for batch in labels(other) for label in batch)
        assert uses == Counter(dict.fromkeys(range(30), int(changes.get("factor", 2))))
        assert other.fresh_examples == (after + number) * 30


@pytest.mark.parametrize(("before", "now"), [(1, 3), (2, 4), (3, 1), (4, 2)])
def test_between_iterations_into_other_numbers_of_ranks(before: int, now: int) -> None:
    common: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 5}
    loader, *others = (
        EchoLoader(Dataset(24), 3, epochs=1, rank=rank, world_size=world, **common)
        for rank, world in ((0, before), *((rank, now) for rank in range(now)))
    )
    labels(loader)
    uses: Counter[int] = Counter()
    for other in others:
        other.load_state_dict(loader.state_dict())
        assert other.fresh_examples == 24 // now
        uses += Counter(label for batch in labels(other) for label in batch)
        assert other.fresh_examples == 2 * 24 // now
    assert uses == Counter(dict.fromkeys(range(24), 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": Dataset(24)}, "source had 20 examples but now has 24"),
        ({"source": arrays(24)}, "source had 20 examples but now has 24"),
        ({"seed": 2}, "seed was 0 and is 2 now"),
        ({"batch_size": 5}, "batch_size was 4 and is 5 now"),
        ({"world_size": 2}, "world_size was 1 and is 2 now; within an iteration"),
        ({"sampler": SequentialSampler(range(20))}, "sampler was None and is 'SequentialSampler of 20' now"),
    ],
)
def test_a_state_of_another_loader_is_refused_and_changes_nothing(changes: Any, message: str) -> None:
    given: dict[str, Any] = {"source": Dataset(20), "batch_size": 4, "shuffle_buffer": 5}
    loader, again = EchoLoader(**given), EchoLoader(**given)
    labels(loader, 2)
    other, undisturbed = (EchoLoader(**{**given, **changes}) for _ in range(2))
    seen = labels(other, 1)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(loader.state_dict())
    assert seen + labels(other, 1) == labels(undisturbed, 2)
    again.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    "more",
    [{"drop_last": True}, {"decode": Bad(9), "max_bad_examples": 2}],
    ids=lambda more: next(iter(more)),
)
def test_fresh_examples_at_the_last_batch_are_those_of_the_batches(more: dict[str, Any]) -> None:
    """Not what lies behind it: rows that make no batch."""
    loader, restored = (EchoLoader(Dataset(10), 3, order="stored", epochs=1, **more) for _ in range(2))
    iterator = iter(loader)
    assert len(labels(iterator, 3)) == 3
    restored.load_state_dict(loader.state_dict())
    assert loader.fresh_examples == restored.fresh_examples == 9
    assert next(iterator, None) is None
    assert loader.fresh_examples == 10


@pytest.mark.parametrize(
    ("echo", "buffers"),
    [
        ("example_before_augmentation", {"shuffle_buffer": 1_000_000}),
        ("batch", {"shuffle_buffer": 100_000, "batch_shuffle_buffer": 500}),
    ],
)
def test_a_state_is_small(echo: str, buffers: dict[str, int]) -> None:
    source = {"label": np.arange(1_000_000)}
    loader = EchoLoader(source, 1000, echo=echo, factor=2, **buffers)
    labels(loader, 20)
    state = loader.state_dict()
    assert len(pickle.dumps(state)) <= 10_000
    restored = EchoLoader(source, 1000, echo=echo, factor=2, **buffers)
    restored.load_state_dict(state)
    assert labels(restored, 10) == labels(loader, 10)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_state_that_is_asked_for_while_one_is_loaded_is_that_one_or_the_one_before(
    interrupted: bool, num_workers: int
) -> None:
    rows, slow = Halting(40, 7), threading.Event()

    def source() -> Any:
        for row in range(40):
            yield (rows[row] if slow.is_set() else example(row))
            if slow.is_set() and row == 7 and interrupted:
                raise KeyboardInterrupt

    def load() -> None:
        with suppress(KeyboardInterrupt):
            loader.load_state_dict(state)

    whole = labels(EchoLoader(Stream(40), 4, shuffle_buffer=6), 18)
    with EchoLoader(source, 4, shuffle_buffer=6, num_workers=num_workers) as loader:
        labels(loader, 3)
        state = loader.state_dict()
        labels(loader, 12)
        slow.set()
        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        assert rows.reading.wait(100)
        assert loader.state_dict()["next_index"] == state["next_index"]
        rows.go.set()
        thread.join(100)
        slow.clear()
        assert labels(loader, 3) == whole[3:6]


def test_the_epoch_that_a_restored_loader_goes_on_with_is_told() -> None:
    def make() -> EchoLoader:
        return EchoLoader(arrays(40), 10, epochs=1, echo="batch", factor=2)

    whole = make()
    expected = [batch for _ in range(3) for batch in labels(whole)]
    for stop in range(17):
        first, resumed = make(), make()
        seen = [labels(first, count) for count in (*[None] * (stop // 8), stop % 8)]
        resumed.load_state_dict(first.state_dict())
        assert resumed.epoch == stop // 8
        seen += [labels(resumed) for _ in range(resumed.epoch, 3)]
        assert [batch for one in seen for batch in one] == expected


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("echo", ["example_before_augmentation", "batch"])
def test_a_state_forgets_bad_examples_that_came_before_what_is_held(echo: str) -> None:
    """More of them than the buffer has slots: what entered is counted back over those that are forgotten."""
    common: dict[str, Any] = {"factor": 2, "decode": Bad(*range(0, 200, 7)), "max_bad_examples": 500}
    loader, undisturbed = (EchoLoader(arrays(200), 8, echo=echo, shuffle_buffer=19, **common) for _ in "12")
    whole = labels(undisturbed, 110)
    for taken in range(0, 100, 10):
        state = loader.state_dict()
        assert len(state["bad_numbers"]) < 20
        resumed = EchoLoader(arrays(200), 8, echo=echo, shuffle_buffer=19, **common)
        resumed.load_state_dict(state)
        assert labels(resumed, 8) == whole[taken : taken + 8]
        labels(loader, 10)
