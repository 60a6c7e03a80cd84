"""Several ranks around another loader's batches: warned where each reads everything, or its part's part."""

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from adaecho import EchoLoader
from adaecho.echo.read.ranks import warn_if_unshared
from tests.echo.behaviour.test_around_data_loaders import Heard

ROWS = 40
RANKS: dict[str, Any] = {"rank": 0, "world_size": 2}
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")
rows: Dataset[Any] = TensorDataset(torch.arange(ROWS))


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"pip install {name.partition('.')[0]} --no-deps")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"shuffle": True}, "RandomSampler .*sampler=Dist"),
        ({}, "SequentialSampler .*sampler=Dist"),
        ({"sampler": SubsetRandomSampler(range(ROWS))}, "SubsetRandomSampler .*sampler=Dist"),
        ({"sampler": list(range(ROWS))}, "list .*sampler=Dist"),
        ({"sampler": DistributedSampler(rows, 1, 0)}, "DistributedSampler .*sampler=Dist"),
        (
            {"batch_sampler": BatchSampler(RandomSampler(range(ROWS)), 4, drop_last=False)},
            r"BatchSampler .*batch_sampler=BatchSampler\(Dist",
        ),
    ],
)
def test_ranks_that_all_read_everything_are_warned(arguments: dict[str, Any], named: str) -> None:
    with pytest.warns(UserWarning, match=f"each of 2 ranks reads all .* its {named}"):
        EchoLoader(DataLoader(rows, **arguments), None, **RANKS)
    EchoLoader(DataLoader(rows, **arguments), None, rank=0, world_size=1)


def test_ranks_that_are_given_one_list_of_batches_are_warned() -> None:
    batches = list(torch.arange(ROWS).split(4))
    with pytest.warns(
        UserWarning,
        match=r"each of 2 ranks reads all .*: nothing shares it out; source\[rank::world_size\] gives",
    ):
        EchoLoader(batches, None, **RANKS)
    EchoLoader(batches[::2], None, rank=0, world_size=1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_are_warned_of_samplers_of_torchdata_too(shuffle: bool) -> None:
    loader = library("torchdata.stateful_dataloader").StatefulDataLoader(rows, 4, shuffle=shuffle)
    with pytest.warns(UserWarning, match="each of 2 ranks reads all .*DistributedSampler"):
        EchoLoader(loader, None, **RANKS)


class Stream(IterableDataset[Any]):
    """One that knows of workers alone, and whose words hold a rank that is none."""

    def __init__(self) -> None:
        self.mergeable_ranks, self.shards = {}, ["a", "b"]

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        return iter(range(worker.id if worker else 0, ROWS))


class OfRank(Stream):
    def __iter__(self) -> Iterator[int]:
        yield from range(torch.distributed.get_rank(), ROWS, 2)


class OfVariable(Stream):
    def __iter__(self) -> Iterator[int]:
        def mine() -> int:
            return int(os.environ["RANK"])

        return iter(range(mine(), ROWS, 2))


class OfAttribute(Stream):
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


def hugging_face(rank: int | None = None) -> Any:
    datasets = library("datasets")
    stream = (
        datasets.Dataset.from_dict({"row": range(ROWS)}).to_iterable_dataset(num_shards=4).shuffle(seed=1)
    )
    if rank is None:
        return stream
    return library("datasets.distributed").split_dataset_by_node(stream, rank, 2)


def filtered(rank: int) -> Any:
    return hugging_face().filter(lambda example: example["row"] % 2 == rank)


def web_dataset(**arguments: Any) -> Any:
    return library("webdataset").WebDataset("none-{0..3}.tar", shardshuffle=False, **arguments)


def nodes(sampler: Any) -> Any:
    torchdata = library("torchdata.nodes")
    return torchdata.Loader(torchdata.Batcher(torchdata.SamplerWrapper(sampler), 4))


def grain(*part: int) -> Any:
    dataset = library("grain").MapDataset.range(ROWS)
    return (dataset[slice(*part)] if part else dataset).shuffle(seed=1).batch(4).to_iter_dataset()


def grain_loader(ranks: int) -> Any:
    python = library("grain.python")
    sampler = python.IndexSampler(ROWS, python.ShardOptions(0, ranks), shuffle=True, num_epochs=1, seed=2)
    return python.DataLoader(data_source=range(ROWS), sampler=sampler, operations=[python.Batch(4)])


def of_rank(_: Any, rank: int = 0) -> int:
    return rank


def generator_function() -> Iterator[Any]:
    yield from torch.arange(ROWS).split(4)


def generator_function_of_rank() -> Iterator[Any]:
    yield from torch.arange(torch.distributed.get_rank(), ROWS, 2).split(4)


class Prefetched:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


shared_rows = DataLoader(rows, sampler=DistributedSampler(rows, 2, 0))

UNSHARED: dict[str, tuple[Callable[[], Any], str]] = {
    "stream": (Stream, "__iter__"),
    "stream in a DataLoader": (lambda: DataLoader(Stream(), 4), "__iter__"),
    "Hugging Face": (lambda: hugging_face().batch(4), "split_dataset_by_node"),
    "Hugging Face in a DataLoader": (lambda: DataLoader(hugging_face(), 4), "split_dataset_by_node"),
    "nodes": (lambda: nodes(RandomSampler(range(ROWS))), "DistributedSampler in its SamplerWrapper"),
    "grain": (grain, r"dataset\[rank::world_size\]"),
    "Grain's DataLoader": (lambda: grain_loader(1), "ShardOptions"),
    "WebDataset": (lambda: web_dataset(nodesplitter=None).batched(4), "split_by_node"),
    "a generator function": (lambda: generator_function, "every world_size-th batch"),
    "a class of one's own": (lambda: Prefetched(generator_function()), "every world_size-th batch"),
    "a wrapper of a DataLoader": (lambda: Prefetched(DataLoader(rows, 4)), r"EchoLoader\(dataset, batch"),
    "a function around a DataLoader": (
        lambda: partial(iter, DataLoader(rows, shuffle=True)),
        "sampler=DistributedSampler",
    ),
}
SHARED: dict[str, Callable[[], Any]] = {
    "rows": lambda: DataLoader(rows, sampler=DistributedSampler(rows, 2, 0)),
    "rows of a rank": lambda: DataLoader(rows, sampler=SubsetRandomSampler(range(3))),
    "a sampler of one's own": lambda: DataLoader(rows, sampler=Heard([])),
    "asks its rank": OfRank,
    "asks the environment": lambda: DataLoader(OfVariable(), 4),
    "has ranks": lambda: OfAttribute(2),
    "its workers ask": lambda: DataLoader(Stream(), 4, num_workers=1, worker_init_fn=of_rank),
    "partly given": lambda: DataLoader(Stream(), 4, collate_fn=partial(of_rank, rank=1)),
    "Hugging Face": lambda: hugging_face(0).batch(4),
    "Hugging Face in a DataLoader": lambda: DataLoader(hugging_face(1), 4),
    "Hugging Face, filtered": lambda: filtered(1).batch(4),
    "nodes": lambda: nodes(DistributedSampler(range(ROWS), 2, 0)),  # type: ignore[arg-type]
    "grain": lambda: grain(0, ROWS, 2),
    "Grain's DataLoader": lambda: grain_loader(2),
    "WebDataset": lambda: web_dataset(nodesplitter=library("webdataset").split_by_node).batched(4),
    "a generator function": lambda: generator_function_of_rank,
    "a wrapper of a DataLoader": lambda: Prefetched(shared_rows),
    "a function around a DataLoader": lambda: lambda: iter(shared_rows),
    "an EchoLoader": lambda: EchoLoader(rows, 4, epochs=1),
    "WebDataset, which refuses ranks itself": lambda: web_dataset().batched(4),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", UNSHARED)
def test_of_a_stream_that_nothing_shares_out_the_librarys_own_way_is_named(name: str) -> None:
    make, remedy = UNSHARED[name]
    with pytest.warns(UserWarning, match=f"each of 2 ranks reads all .* nothing.* .*{remedy}"):
        EchoLoader(make(), None, **RANKS)
    assert not warn_if_unshared(make(), 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SHARED)
def test_what_may_share_out_is_not_warned_of(name: str) -> None:
    source = SHARED[name]()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="source: each of")
        EchoLoader(source, None, **RANKS)


@pytest.mark.parametrize("make", [lambda: hugging_face(0), lambda: DataLoader(hugging_face(0), None)])
def test_examples_that_are_shared_out_twice_are_warned_of(make: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match="of which this loader gives each of 2 ranks a part again"):
        EchoLoader(make(), 4, **RANKS)
    EchoLoader(make(), 4, rank=0, world_size=1)
    EchoLoader(hugging_face(), 4, **RANKS)  # shared out once
