"""States: size, format, other settings, and refused states."""

import pickle
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import SequentialSampler

from adaecho import EchoLoader
from adaecho.echo.state import VERSION
from tests.echo.others import plain, stateful_data_loader
from tests.echo.sources import Bad, Dataset, arrays, labels


@pytest.mark.parametrize("echo", ["example_before_augmentation", "example_after_augmentation", "batch"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resume_under_another_factor(echo: str, num_workers: int) -> None:
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
    # Examples read under the old factor come twice, later ones three times
    twice = sum(number == 2 for number in uses.values())
    if echo == "batch":
        assert twice == 12  # three batches
    else:
        assert fresh - 1 <= twice <= fresh


def test_set_epoch_after_a_resume_uses_the_current_factor() -> None:
    given: dict[str, Any] = {"echo": "example_before_augmentation", "shuffle_buffer": 8, "epochs": 1}
    first, second = (EchoLoader(Dataset(20), 4, factor=factor, **given) for factor in (2, 3))
    labels(first)
    second.load_state_dict(first.state_dict())
    second.set_epoch(0)
    assert len(second) == 15
    assert Counter(row for batch in labels(second) for row in batch) == dict.fromkeys(range(20), 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 5}, {"echo": "batch", "factor": 3, "batch_shuffle_buffer": 4},
        {"echo": "none", "factor": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_resume_between_epochs_accepts_other_settings(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "batch_size": 4, "echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 7, "epochs": 1,
    }  # fmt: skip
    loader = EchoLoader(Dataset(30), **given)
    labels(loader)
    other = EchoLoader(Dataset(30), **{**given, **changes})
    other.load_state_dict(loader.state_dict())
    for number in (2, 3):
        uses = Counter(label for batch in labels(other) for label in batch)
        assert uses == Counter(dict.fromkeys(range(30), int(changes.get("factor", 2))))
        assert other.fresh_examples == number * 30


@pytest.mark.parametrize(("before", "now"), [(1, 3), (4, 2)])
def test_a_resume_between_epochs_accepts_other_numbers_of_ranks(before: int, now: int) -> None:
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
        ({"seed": 2}, "seed was 0 and is now 2"),
        ({"batch_size": 5}, "batch_size was 4 and is now 5"),
        ({"world_size": 2}, "world_size was 1 and is now 2; within an iteration"),
        ({"sampler": SequentialSampler(range(20))}, "sampler was None and is now 'SequentialSampler of 20'"),
    ],
)
def test_a_state_of_another_loader_is_refused(changes: Any, message: str) -> None:
    given: dict[str, Any] = {"source": Dataset(20), "batch_size": 4, "shuffle_buffer": 5}
    loader, again = EchoLoader(**given), EchoLoader(**given)
    labels(loader, 2)
    other, uninterrupted = (EchoLoader(**{**given, **changes}) for _ in range(2))
    seen = labels(other, 1)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(loader.state_dict())
    assert seen + labels(other, 1) == labels(uninterrupted, 2)
    again.load_state_dict(loader.state_dict())


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


def test_epoch_of_a_restored_loader() -> None:
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
def test_a_state_drops_bad_examples_that_precede_the_buffer(echo: str) -> None:
    """There are more bad examples than buffer slots."""
    common: dict[str, Any] = {"factor": 2, "decode": Bad(*range(0, 200, 7)), "max_bad_examples": 500}
    loader, uninterrupted = (EchoLoader(arrays(200), 8, echo=echo, shuffle_buffer=19, **common) for _ in "12")
    whole = labels(uninterrupted, 110)
    for taken in range(0, 100, 10):
        state = loader.state_dict()
        assert len(state["bad_numbers"]) < 20
        resumed = EchoLoader(arrays(200), 8, echo=echo, shuffle_buffer=19, **common)
        resumed.load_state_dict(state)
        assert labels(resumed, 8) == whole[taken : taken + 8]
        labels(loader, 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: torch.nn.Linear(2, 2).state_dict(), "the state has format version None"),
        (lambda state: {**state, "version": VERSION + 1}, f"version {VERSION + 1}, .* reads {VERSION}; pass"),
    ],
)
def test_a_state_of_another_format_is_refused(change: Any, message: str) -> None:
    loader = EchoLoader(arrays(20), 4, order="sequential")
    state = loader.state_dict()
    assert labels(loader, 1) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(change(state))
    assert labels(loader, 1) == [[4, 5, 6, 7]]


Given = dict[str, Any]


def with_arrays() -> Given:
    return {"source": arrays(60), "batch_size": np.int64(4), "epochs": 5}


def with_bad_examples() -> Given:
    return {"source": Dataset(60), "batch_size": 4, "decode": Bad(*range(0, 60, 7)), "max_bad_examples": 20}


def with_stateful_data_loader() -> Given:
    dataset = torch.utils.data.TensorDataset(torch.arange(60))
    return {"source": stateful_data_loader(dataset, 4, shuffle=True), "batch_size": None}


def with_all_ranks() -> Given:
    return {"source": arrays(60), "batch_size": 4, "state_of_all_ranks": True}


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("taken", [0, 9])
@pytest.mark.parametrize("make", [with_arrays, with_bad_examples, with_stateful_data_loader, with_all_ranks])
def test_a_distributed_checkpoint_resumes_a_new_loader(make: Any, taken: int, tmp_path: Path) -> None:
    """A new loader has all keys of the state. Torch requests them before it loads."""
    loader, restored = (EchoLoader(**make(), echo="batch", factor=2, batch_shuffle_buffer=3) for _ in "12")
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    state = loader.state_dict()
    assert all(isinstance(value, int | float | str | list) for value in state.values())
    numbers = [number for value in state.values() if isinstance(value, list) for number in value]
    assert {type(number) for number in numbers} <= {int, float}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a process group torch warns
        dcp.save({"loader": loader}, checkpoint_id=tmp_path)
        dcp.load({"loader": restored}, checkpoint_id=tmp_path)
    assert restored.bad_examples == loader.bad_examples
    for _, batch, again in zip(range(12), batches, restored, strict=False):
        assert plain(again) == plain(batch)
    assert restored.fresh_examples == loader.fresh_examples
