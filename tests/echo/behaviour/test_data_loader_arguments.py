"""Every argument and attribute of a DataLoader gets an answer."""

import copy
import inspect
import itertools
import json
import pickle
import tracemalloc
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from adaecho import EchoLoader
from adaecho.echo.order import stream as stream_module
from adaecho.echo.variants import MAX_FACTOR
from tests.echo.sources import Dataset as Rows
from tests.echo.sources import Stream, arrays, labels
from tests.helpers import through_torch_save

THREE_BATCHES = BatchSampler(SequentialSampler(range(9)), 3, False)
# An argument of DataLoader: values that are taken, and one that is refused.
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


def test_no_argument_of_data_loader_is_left_out() -> None:
    assert set(inspect.signature(DataLoader).parameters) == {"dataset", "batch_size", *ANSWERS}


@pytest.mark.parametrize("name", ANSWERS)
def test_each_is_taken_or_refused_in_one_line_that_says_what_replaces_it(name: str) -> None:
    taken, refused, message = ANSWERS[name]
    for value in taken:
        with EchoLoader(Rows(9), 2, epochs=1, **{name: value}) as loader:
            assert len(list(loader)) == (4 if (name, value) == ("drop_last", True) else 5)
    if message:
        with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
            EchoLoader(Rows(9), 2, **{name: refused})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"shuffle": False}, {"order": "stored"}),
        ({"shuffle": True}, {}),
        ({"collate_fn": max}, {"collate": max}),
    ],
    ids=lambda given: "-".join(given),
)
def test_another_name_of_the_same(given: dict[str, Any], same: dict[str, Any], num_workers: int) -> None:
    def batches(**arguments: Any) -> list[Any]:
        with EchoLoader(range(20), 4, epochs=1, **arguments) as loader:
            return [batch if isinstance(batch, int) else batch.tolist() for batch in loader]

    assert batches(num_workers=num_workers, **given) == batches(**same)
    if given.get("shuffle") is False:
        assert batches(**given) == [batch.tolist() for batch in DataLoader(range(20), 4)]  # type: ignore[arg-type]


def test_attributes_are_those_of_a_data_loader() -> None:
    source, sampler = Rows(9), SequentialSampler(range(9))
    loader = EchoLoader(source, 3, num_workers=2, drop_last=True, epochs=1, sampler=sampler)
    assert loader.dataset is source
    assert loader.sampler is sampler  # type: ignore[attr-defined]
    assert (loader.batch_size, loader.num_workers, loader.drop_last, len(loader)) == (3, 2, True, 3)
    for name in ("sampler", "batch_sampler", "other"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'$"):
            getattr(EchoLoader(source, 3), name)


def test_set_epoch_goes_to_an_iteration() -> None:
    plain, habit, resumed = (EchoLoader(Rows(20), 4, epochs=1) for _ in range(3))
    passes = [labels(plain) for _ in range(4)]
    for epoch in range(3):
        habit.set_epoch(epoch)
        assert labels(habit) == passes[epoch]
    habit.set_epoch(1)
    assert labels(habit, 2) == passes[1][:2]
    state = habit.state_dict()
    assert labels(habit) == passes[2]
    for epoch, expected in ((1, passes[1][2:]), (3, passes[3])):  # the pass that was restored goes on
        resumed.load_state_dict(state)
        resumed.set_epoch(epoch)
        assert labels(resumed) == expected
    endless = EchoLoader(Rows(20), 4)
    endless.set_epoch(3)
    assert labels(endless, 5) == passes[0]


def test_set_epoch_of_a_new_loader_around_what_is_iterated_is_told() -> None:
    loader = EchoLoader(Stream(20), 4, epochs=1)
    loader.set_epoch(2)
    with pytest.warns(UserWarning, match=r"^set_epoch\(2\) of a new EchoLoader .* as in epoch 0;") as told:
        iter(loader)
    assert told[0].filename == __file__
    for epoch in (3, 4):  # which would be an error here if it were told again
        loader.set_epoch(epoch)
        assert len(labels(loader)) == 5
    tried = EchoLoader(Stream(20), 4, epochs=1)
    iter(tried)
    assert len(labels(tried)) == 5


def test_a_state_comes_before_what_set_epoch_said_before_and_epoch_tells_what_begins() -> None:
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
    assert loader.epoch == 5  # the rest of the fourth is given up


def test_a_state_holds_plain_values_whatever_was_given() -> None:
    given: dict[str, Any] = {"echo": np.str_("batch"), "order": np.str_("stored"), "factor": Fraction(3, 2)}
    state = EchoLoader(Rows(20), 4, **given).state_dict()
    assert json.loads(through_torch_save(state)["settings"])["factor"] == 1.5


def test_an_earlier_epoch_is_read_under_the_factor_in_force() -> None:
    """Epochs are counted from 0 again in a second phase, under another factor."""

    def make(factor: float) -> EchoLoader:
        echo = "example_before_augmentation"
        return EchoLoader(Rows(20), 4, echo=echo, factor=factor, shuffle_buffer=8, epochs=1)

    first = make(2)
    labels(first)
    loader, resumed = make(3), make(3)
    loader.load_state_dict(first.state_dict())
    for epoch in (0, 1, 0, 2):
        loader.set_epoch(epoch)
        assert len(loader) == 15
        resumed.load_state_dict(loader.state_dict())
        resumed.set_epoch(epoch)
        batches = iter(loader)
        taken = labels(batches, 2)
        assert labels(resumed, 2) == taken
        resumed.load_state_dict(loader.state_dict())
        rest = labels(batches)
        assert Counter(Counter(itertools.chain(*taken, *rest)).values()) == {3: 20}
        assert labels(resumed) == rest


@pytest.mark.parametrize("echo", ["example_before_augmentation", "example_after_augmentation", "batch"])
def test_states_of_an_earlier_epoch_are_taken_where_the_factor_followed_R(echo: str) -> None:  # noqa: N802
    def make() -> EchoLoader:
        loader = EchoLoader(Rows(400), 4, echo=echo, factor="auto", epochs=1, shuffle_buffer=20)
        ratios = itertools.cycle([2.0, 3.0, 1.0, 4.0])
        loader.agree_on_R = lambda _: next(ratios)
        return loader

    loader = make()
    for epoch in (0, 1, 0, 1):
        loader.set_epoch(epoch)
        for number, _ in enumerate(loader):
            if number in (30, 90):
                resumed = make()
                resumed.load_state_dict(loader.state_dict())
                assert resumed.factor == loader.factor
        resumed.load_state_dict(loader.state_dict())


class Sized(IterableDataset[int]):
    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Any:
        return iter(range(22))


@pytest.mark.parametrize("factor", [1, 2, 1.6])
@pytest.mark.parametrize("source", [TensorDataset(torch.arange(22)), Sized()], ids=["rows", "iterable"])
@pytest.mark.parametrize("batched", [True, False])
def test_the_length_around_what_is_iterated(batched: bool, source: Any, factor: float) -> None:
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
    ("arguments", "message"),
    [
        ({"source": Rows(9)}, "needs epochs=; without it, iteration is endless"),
        ({"source": Rows(9), "epochs": 1, "echo": "batch", "factor": "auto"}, "factor='auto'"),
        ({"source": Stream(9), "epochs": 1}, "is unknown: the wrapped Stream has no length"),
    ],
    ids=["endless", "automatic factor", "stream"],
)
def test_where_there_is_no_length_the_reason_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        len(EchoLoader(batch_size=3, **arguments))


BATCHED: Any = DataLoader(TensorDataset(torch.arange(9)), batch_size=4)
ROWS: Any = TensorDataset(torch.arange(3))


class Frame:
    """Indexed by columns, as a table of pandas."""

    columns, iloc = ("x",), ()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> Any:
        return {"x": [1, 2, 3]}[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "train.npz"}, "source='train.npz': a string is not a source of examples"),
        ({"source": BATCHED}, r"batch_size=3: the source .DataLoader. makes batches, .*batch_size=None"),
        ({"source": EchoLoader(arrays(8), 4)}, r"batch_size=3: the source .EchoLoader. makes batches"),
        ({"source": {"x": [1, 2, 3], "label": [0, 1, 0]}}, r"not indexed by row; .* \{name: numpy"),
        ({"source": Frame()}, "a Frame of columns or splits is not indexed by row"),
        ({"source": {"train": ROWS, "test": ROWS}}, r"not indexed by row; .*one split"),
        ({"source": []}, "contains no examples"),
        ({"source": 5}, "neither indexable with a length nor iterable"),
        ({"source": {"a": np.zeros(3), "b": np.zeros(4)}}, r"different lengths \(3, 4\)"),
        ({"source": Stream(9), "sampler": SequentialSampler(range(9))}, "is an iterable"),
        ({"source": Stream(9), "shuffle": True}, "shuffle=True: Stream is an iterable.*shuffle_buffer"),
        ({"sampler": SequentialSampler(range(9)), "shuffle": True}, "with shuffle=True: both set the"),
        ({"sampler": SequentialSampler(range(9)), "order": "stored"}, "with order='stored': both set"),
        ({"sampler": SequentialSampler(range(9)), "batch_size": None}, "with batch_size=None"),
        ({"source": {"x": np.zeros((4, 2)), "name": np.array([*"abcd"])}}, "pass numeric arrays"),
        ({"source": (torch.zeros(4, 2), torch.zeros(4, 2).bfloat16())}, "arrays is not numeric"),
        ({"source": {"x": torch.zeros(4, 2, device="meta")}}, "pass numeric arrays"),
        ({"source": Stream(9), "order": "shards"}, "order='shards': Stream is an iterable"),
        *[({name: 3}, "must be a function, got int") for name in ("decode", "collate", "collate_fn")],
        ({"batch_length": 3, "batch_size": None, "source": [1]}, "batch_length=3: must be a function"),
        ({"augment": 3}, "augment: a int is not callable"),
        ({"augment": (max,)}, r"expected a tuple \(once, each_time\), got 1 parts"),
        ({"augment": (max, None)}, "a NoneType is not callable"),
        ({"batch_size": None, "source": {"x": np.zeros((5, 8, 2))}}, "batch_size=None: arrays hold examples"),
        ({"batch_size": None, "order": "shards"}, "order='shards' with batch_size=None"),
        ({"batch_size": None, "augment": max}, "augment with batch_size=None"),
        ({"batch_size": None, "collate": list}, "collate with batch_size=None"),
        ({"batch_size": 2, "batch_length": len}, "batch_length with batch_size=2"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"echo": "echo"}, "echo='echo': must be one of none, batch"),
        ({"factor": 2}, "echo=none repeats nothing"),
        ({"factor": "auto"}, "echo=none repeats nothing"),
        *[
            ({"echo": "batch", "factor": factor}, r"^factor=.*: must be ")
            for factor in (None, True, "2", "lots", 0.5, float("nan"), float("inf"), MAX_FACTOR, [2])
        ],
        ({"seed": 1.5}, "seed=1.5: must be an integer$"),
        ({"batch_size": np.float64(2)}, r"batch_size=.*: must be an integer, at least 1"),
        ({"batch_size": True}, "batch_size=True"),
        ({"epochs": np.int64(0)}, "epochs=.*at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": None, "echo": "example_before_augmentation"}, "with batch_size=None"),
        ({"batch_size": None, "shuffle_buffer": 5}, "shuffle_buffer=5 with batch_size=None"),
        ({"shuffle_buffer": -1}, "shuffle_buffer=-1"),
        ({"batch_shuffle_buffer": 2}, "only echo=batch repeats batches"),
        ({"order": "sorted"}, "order='sorted'"),
        ({"shuffle": True, "order": "stored"}, "contradict each other"),
        ({"shuffle": False, "order": "shards"}, "contradict each other"),
        ({"shuffle": False, "shuffle_buffer": 5}, "shuffle=False with shuffle_buffer=5: a shuffle buffer sh"),
        ({"prefetch_factor": 1.5, "num_workers": 1}, r"prefetch=.*must be an integer"),
        ({"epochs": 0}, "epochs=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
    ],
)
def test_what_can_not_be_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EchoLoader(**{"source": Rows(9), "batch_size": 3, **arguments})


def test_what_a_function_forgot_to_return_is_told() -> None:
    with pytest.raises(ValueError, match="returned a NoneType, which is not iterable; a function"):
        next(iter(EchoLoader(lambda: None, 3, epochs=1)))


def test_a_dict_of_rows_is_a_dataset() -> None:
    assert len(EchoLoader({0: "a", 1: "b"}, 2, collate=list, epochs=1)) == 1


def test_calls_as_of_a_data_loader() -> None:
    dataset = TensorDataset(torch.arange(20.0))
    assert len(next(iter(EchoLoader(dataset, shuffle=True)))[0]) == 1
    assert len(next(iter(EchoLoader(dataset=dataset, batch_size=10)))[0]) == 10
    for given, arguments, message in (
        ((), {"batch_size": 3}, "needs a source of examples"),
        ((dataset, 3), {"shuffle_bufer": 3}, "no argument 'shuffle_bufer'"),
    ):
        with pytest.raises(TypeError, match=message):
            EchoLoader(*given, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_is_neither_copied_nor_sent(copied: Any) -> None:
    with EchoLoader(arrays(9), 3, num_workers=1) as loader:
        next(iter(loader))
        with pytest.raises(
            TypeError, match=r"cannot be copied or pickled, .* pass state_dict\(\) to load_state_dict\(\)"
        ):
            copied(loader)


@pytest.mark.filterwarnings("error")
def test_an_echo_that_does_nothing_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="shuffle_buffer=0: all repeats of an exam") as caught:
        EchoLoader(arrays(9), 3, echo="example_before_augmentation", factor=2)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="echo='batch' with factor=1 repeats nothing; pass factor=2"):
        EchoLoader(arrays(9), 3, echo="batch")
    for quiet in (
        {}, {"echo": "batch", "factor": "auto"}, {"shuffle_buffer": 9}, {"shuffle_buffer": 1000, "epochs": 1},
        {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 6},
    ):  # fmt: skip
        EchoLoader(arrays(9), 3, **quiet)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "passes"),
    [
        ({"shuffle_buffer": 24}, "2.0"),
        ({"shuffle_buffer": 24, "rank": 1, "world_size": 2}, "4.0"),
        ({"shuffle_buffer": 48, "echo": "example_before_augmentation", "factor": 2}, "2.0"),
        ({"echo": "batch", "factor": 2, "batch_shuffle_buffer": 16}, "2.0"),
        ({"shuffle_buffer": 10**6, "epochs": 3}, "3.0"),
    ],
)
def test_a_buffer_of_several_passes_is_warned_of(arguments: dict[str, Any], passes: str) -> None:
    with pytest.warns(UserWarning, match=f"takes {passes} passes over the source's 12 examples") as caught:
        EchoLoader(arrays(12), 3, **arguments)
    assert len(caught) == 1


def test_passes_of_whole_batches_are_told_too() -> None:
    source = list(torch.arange(12).split(3))
    with pytest.warns(
        UserWarning, match=r"batch_shuffle_buffer=16: .* 2.0 passes over the source's 4 batches"
    ):
        EchoLoader(source, None, echo="batch", factor=2, batch_shuffle_buffer=16)


@pytest.mark.parametrize(("echo", "factor"), [("none", 1), ("example_before_augmentation", 3), ("batch", 3)])
def test_the_number_of_batches_of_an_enormous_source_takes_no_memory(echo: str, factor: int) -> None:
    loader = EchoLoader(range(10**9), 64, echo=echo, factor=factor, shuffle_buffer=99, epochs=5)
    tracemalloc.start()
    try:
        assert len(loader) == factor * 5 * 10**9 // 64
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("echo", ["example_before_augmentation", "batch"])
def test_batches_under_a_factor_that_is_not_whole_are_counted_in_blocks(
    echo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_COUNTED", 7)
    common: dict[str, Any] = {"echo": echo, "factor": 1.6, "shuffle_buffer": 9, "epochs": 2}
    for rank, world in ((0, 1), (0, 3), (1, 3), (2, 3)):
        loader = EchoLoader(arrays(100), 3, rank=rank, world_size=world, **common)
        for _ in range(2):
            assert len(loader) == len(list(loader))


def test_numpy_scalars_are_plain_numbers() -> None:
    numbers: dict[str, Any] = {
        "batch_size": 4, "factor": 1.5, "shuffle_buffer": 3, "epochs": 2, "seed": 3, "rank": 1,
        "world_size": 2, "max_factor": 8.0, "max_bad_examples": 0, "num_workers": 1, "prefetch": 1,
    }  # fmt: skip
    scalars = {name: np.asarray(number)[()] for name, number in numbers.items()}
    echo = "example_before_augmentation"
    with (
        EchoLoader(Rows(20), echo=echo, **numbers) as plain,
        EchoLoader(Rows(20), echo=echo, **scalars) as loader,
    ):
        assert labels(loader, 3) == labels(plain, 3)
        state = through_torch_save(loader.state_dict())
        plain.load_state_dict(state)
    assert plain.state_dict()["settings"] == state["settings"]
