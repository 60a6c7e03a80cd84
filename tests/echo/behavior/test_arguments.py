"""Arguments and attributes: those of a DataLoader, invalid values, warnings."""

import copy
import inspect
import pickle
import tracemalloc
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from adaecho import EchoLoader
from adaecho.echo.variants import MAX_FACTOR
from tests.echo.sources import Dataset as Rows
from tests.echo.sources import Stream, arrays, labels

THREE_BATCHES = BatchSampler(SequentialSampler(range(9)), 3, False)
# Argument of DataLoader: accepted values, one refused value, and the message
ANSWERS: dict[str, tuple[list[Any], Any, str]] = {
    "shuffle": ([None, True, False], None, ""),
    "drop_last": ([True, False], None, ""),
    "collate_fn": ([None, list], None, ""),
    "num_workers": ([0, 2], -1, "num_workers=-1: must be an integer, at least 0"),
    "prefetch_factor": ([None, 2], 1.5, r"prefetch=0.0: must be an integer, at least 0"),
    "persistent_workers": ([True, False], None, ""),
    "sampler": ([None, SequentialSampler(range(9))], iter(()), "sampler=tuple_iterator: the sampler"),
    "batch_sampler": ([None], THREE_BATCHES, r"batch_sampler=BatchSampler: the loader makes batches.*"
                      r"EchoLoader\(data_loader, batch_size=None"),
    "pin_memory": ([False], True, "pin_memory=True: device='cuda' pins batches"),
    "pin_memory_device": ([""], "cuda", "pin_memory_device='cuda': device= sets"),
    "timeout": ([0], 30, "timeout=30: set the time limit in the source"),
    "worker_init_fn": ([None], print, "worker_init_fn=builtin_function_or_method: randomness is keyed"),
    "multiprocessing_context": ([None], "spawn", "multiprocessing_context='spawn': worker processes"),
    "generator": ([None], torch.Generator(), r"generator=Generator: .*seed=generator.initial_seed\(\)"),
    "in_order": ([True], False, "in_order=False: batches always come in order"),
}  # fmt: skip


def test_every_argument_of_data_loader_is_covered() -> None:
    assert set(inspect.signature(DataLoader).parameters) == {"dataset", "batch_size", *ANSWERS}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_argument_is_accepted_or_refused_with_its_replacement(name: str) -> None:
    accepted, refused, message = ANSWERS[name]
    for value in accepted:
        with EchoLoader(Rows(9), 2, epochs=1, **{name: value}) as loader:
            assert len(list(loader)) == (4 if (name, value) == ("drop_last", True) else 5)
    if message:
        with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
            EchoLoader(Rows(9), 2, **{name: refused})


def test_attributes_equal_those_of_a_data_loader() -> None:
    source, sampler = Rows(9), SequentialSampler(range(9))
    loader = EchoLoader(source, 3, num_workers=2, drop_last=True, epochs=1, sampler=sampler)
    assert loader.dataset is source
    assert loader.sampler is sampler  # type: ignore[attr-defined]
    assert (loader.batch_size, loader.num_workers, loader.drop_last, len(loader)) == (3, 2, True, 3)
    for name in ("sampler", "batch_sampler", "other"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'$"):
            getattr(EchoLoader(source, 3), name)


def test_set_epoch_selects_the_epoch() -> None:
    reference, loader, resumed = (EchoLoader(Rows(20), 4, epochs=1) for _ in range(3))
    passes = [labels(reference) for _ in range(4)]
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert labels(loader) == passes[epoch]
    loader.set_epoch(1)
    assert labels(loader, 2) == passes[1][:2]
    state = loader.state_dict()
    assert labels(loader) == passes[2]
    for epoch, expected in ((1, passes[1][2:]), (3, passes[3])):
        resumed.load_state_dict(state)
        resumed.set_epoch(epoch)
        assert labels(resumed) == expected


def test_set_epoch_of_a_new_loader_around_an_iterable_warns() -> None:
    loader = EchoLoader(Stream(20), 4, epochs=1)
    loader.set_epoch(2)
    with pytest.warns(UserWarning, match=r"^set_epoch\(2\) of a new EchoLoader .* as in epoch 0;") as caught:
        iter(loader)
    assert caught[0].filename == __file__
    for epoch in (3, 4):  # a second warning would be an error here
        loader.set_epoch(epoch)
        assert len(labels(loader)) == 5


def test_a_loaded_state_overrides_an_earlier_set_epoch() -> None:
    first, loader = (EchoLoader(Rows(20), 4, epochs=1) for _ in range(2))
    passes = [labels(first) for _ in range(4)]
    loader.set_epoch(2)
    assert loader.epoch == 2
    assert labels(loader) == passes[2]
    state = loader.state_dict()
    loader.set_epoch(0)
    loader.load_state_dict(state)
    assert loader.epoch == 3
    assert labels(loader) == passes[3]
    for _ in loader:
        assert loader.epoch == 4
        break
    assert loader.epoch == 5  # the rest of the fourth epoch is abandoned


class Sized(IterableDataset[int]):
    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Any:
        return iter(range(22))


@pytest.mark.parametrize("factor", [1, 1.6])
@pytest.mark.parametrize("source", [TensorDataset(torch.arange(22)), Sized()], ids=["rows", "iterable"])
@pytest.mark.parametrize("batched", [True, False])
def test_the_length_equals_the_number_of_batches(batched: bool, source: Any, factor: float) -> None:
    arguments: dict[str, Any] = {"echo": "batch", "batch_size": None} if batched else {"batch_size": 4}
    arguments = {"echo": "example_before_augmentation", "epochs": 2, "factor": factor, **arguments}
    loader = EchoLoader(DataLoader(source, 4) if batched else source, **arguments)
    for _ in range(2):
        announced = len(loader)
        assert announced == sum(1 for _ in loader) > 3
        announced = len(loader)
        list(islice(loader, 3))
        loader.load_state_dict(loader.state_dict())
        assert len(loader) == announced
        assert sum(1 for _ in loader) == announced - 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"source": Rows(9)},
        {"source": Rows(9), "epochs": 1, "echo": "batch", "factor": "auto"},
        {"source": Stream(9), "epochs": 1},
    ],
    ids=["endless", "automatic factor", "stream"],
)
def test_a_missing_length_is_explained(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"needs epochs=, .* and a source with a length"):
        len(EchoLoader(batch_size=3, **arguments))


BATCHED: Any = DataLoader(TensorDataset(torch.arange(9)), batch_size=4)
ROWS: Any = TensorDataset(torch.arange(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "train.npz"}, "source='train.npz': a string is not a source of examples"),
        ({"source": BATCHED}, r"batch_size=3: the source .DataLoader. makes batches, .*batch_size=None"),
        ({"source": {"x": [1, 2, 3], "label": [0, 1, 0]}}, r"not indexed by row; .* \{name: numpy"),
        ({"source": {"train": ROWS, "test": ROWS}}, r"not indexed by row; .*one split"),
        ({"source": []}, "contains no examples"),
        ({"source": 5}, "neither indexable with a length nor iterable"),
        ({"source": {"a": np.zeros(3), "b": np.zeros(4)}}, r"different lengths \(3, 4\)"),
        ({"source": Stream(9), "sampler": SequentialSampler(range(9))}, "is an iterable"),
        ({"source": Stream(9), "shuffle": True}, "Stream is an iterable.*shuffle_buffer"),
        ({"sampler": SequentialSampler(range(9)), "shuffle": True}, "pass only one"),
        (
            {"sampler": SequentialSampler(range(9)), "order": "sequential"},
            "with order='sequential': both set",
        ),
        ({"sampler": SequentialSampler(range(9)), "batch_size": None}, "with batch_size=None"),
        ({"source": {"x": np.zeros((4, 2)), "name": np.array([*"abcd"])}}, "pass numeric arrays"),
        ({"source": Stream(9), "order": "shards"}, "Stream is an iterable.*shuffle_buffer"),
        *[({name: 3}, "must be a function, got int") for name in ("decode", "collate", "collate_fn")],
        ({"augment": 3}, "augment: a int is not callable"),
        ({"augment": (max,)}, r"expected a tuple \(once, each_time\), got 1 parts"),
        ({"batch_size": None, "source": {"x": np.zeros((5, 8, 2))}}, "batch_size=None: arrays hold examples"),
        ({"batch_size": None, "order": "shards"}, "order='shards' with batch_size=None"),
        ({"batch_size": None, "augment": max}, "augment with batch_size=None"),
        ({"batch_size": None, "collate": list}, "collate with batch_size=None"),
        ({"echo": "echo"}, "echo='echo': must be one of none, batch"),
        ({"factor": 2}, "echo=none repeats nothing"),
        *[
            ({"echo": "batch", "factor": factor}, r"^factor=.*: must be ")
            for factor in (None, "lots", 0.5, float("nan"), MAX_FACTOR)
        ],
        ({"seed": 1.5}, "seed=1.5: must be an integer$"),
        ({"batch_size": 2.0}, r"batch_size=.*: must be an integer, at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": None, "echo": "example_before_augmentation"}, "with batch_size=None"),
        ({"batch_size": None, "shuffle_buffer": 5}, "shuffle_buffer=5 with batch_size=None"),
        ({"shuffle_buffer": -1}, "shuffle_buffer=-1"),
        ({"batch_shuffle_buffer": 2}, "only echo=batch repeats batches"),
        ({"order": "sorted"}, "order='sorted'"),
        ({"epochs": 0}, "epochs=0"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EchoLoader(**{"source": Rows(9), "batch_size": 3, **arguments})


def test_a_source_function_that_returns_none_is_refused() -> None:
    with pytest.raises(ValueError, match="returned a NoneType, which is not iterable; a function"):
        next(iter(EchoLoader(lambda: None, 3, epochs=1)))


def test_positional_and_named_arguments() -> None:
    dataset = TensorDataset(torch.arange(20.0))
    assert len(next(iter(EchoLoader(dataset, shuffle=True)))[0]) == 1
    assert len(next(iter(EchoLoader(dataset=dataset, batch_size=10)))[0]) == 10
    batches = EchoLoader(dataset, 3, shuffle=False, collate_fn=lambda rows: [int(row) for (row,) in rows])
    assert next(iter(batches)) == [0, 1, 2]
    for given, arguments, message in (
        ((), {"batch_size": 3}, "needs a source of examples"),
        ((dataset, 3), {"shuffle_bufer": 3}, "no argument 'shuffle_bufer'"),
    ):
        with pytest.raises(TypeError, match=message):
            EchoLoader(*given, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_loader_cannot_be_copied_or_pickled(copied: Any) -> None:
    with EchoLoader(arrays(9), 3, num_workers=1) as loader:
        next(iter(loader))
        with pytest.raises(
            TypeError, match=r"cannot be copied or pickled, .* pass state_dict\(\) to load_state_dict\(\)"
        ):
            copied(loader)


@pytest.mark.filterwarnings("error")
def test_an_echo_without_effect_warns() -> None:
    with pytest.warns(UserWarning, match="shuffle_buffer=0: all repeats of an exam") as caught:
        EchoLoader(arrays(9), 3, echo="example_before_augmentation", factor=2)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="echo='batch' with factor=1 repeats nothing; pass factor=2"):
        EchoLoader(arrays(9), 3, echo="batch")
    EchoLoader(arrays(9), 3, echo="example_before_augmentation", factor=2, shuffle_buffer=6)


@pytest.mark.parametrize(("echo", "factor"), [("none", 1), ("example_before_augmentation", 3), ("batch", 3)])
def test_the_length_of_a_huge_source_needs_no_memory(echo: str, factor: int) -> None:
    loader = EchoLoader(range(10**9), 64, echo=echo, factor=factor, shuffle_buffer=99, epochs=5)
    tracemalloc.start()
    try:
        assert len(loader) == factor * 5 * 10**9 // 64
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    if echo != "none":
        loader = EchoLoader(range(10**6), 64, echo=echo, factor=1.5, epochs=1)
        assert len(loader) == pytest.approx(1.5 * 10**6 / 64, rel=0.01)
