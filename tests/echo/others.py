"""Loaders of other libraries with the same rows, in whole batches or as single examples."""

import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import data

ROWS, SIZE = 44, 8
Make = Callable[[Path, int | None], Any]
"""Takes a folder for files and the batch size. None yields single examples."""


def data_loader(size: int | None, **more: Any) -> Any:
    return data.DataLoader(
        data.TensorDataset(torch.arange(ROWS)),
        **more if "batch_sampler" in more else {"batch_size": size, **more},
    )


def with_batch_sampler(size: int | None) -> Any:
    if size is None:
        return data_loader(None, sampler=data.RandomSampler(range(ROWS)), num_workers=1)
    sampler = data.BatchSampler(data.RandomSampler(range(ROWS)), size, drop_last=False)
    return data_loader(size, batch_sampler=sampler, num_workers=2)


def stateful_data_loader(source: Any, size: int | None, **more: Any) -> Any:
    library = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata --no-deps")
    return library.StatefulDataLoader(source, size, **more)


def grain(_: Path, size: int | None) -> Any:
    library = pytest.importorskip("grain", reason="pip install grain")
    rows = library.MapDataset.range(ROWS).seed(3).shuffle()
    return (rows.batch(size) if size else rows).to_iter_dataset()


def hugging_face(_: Path, size: int | None) -> Any:
    datasets = pytest.importorskip("datasets", reason="pip install '.[trainers]'")
    stream = datasets.Dataset.from_dict({"row": range(ROWS)}).to_iterable_dataset(num_shards=4)
    stream = stream.shuffle(seed=1, buffer_size=20)
    return stream.batch(size) if size else stream


def web_dataset(folder: Path, size: int | None, stage: Callable[[Any], Any]) -> Any:
    webdataset = pytest.importorskip("webdataset", reason="pip install '.[trainers]'")
    shard = folder / "rows.tar"
    if not shard.exists():
        with tarfile.open(shard, "w") as archive:
            for row in range(ROWS):
                member, content = tarfile.TarInfo(f"{row:04d}.cls"), str(row).encode()
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    opened = stage(webdataset.WebDataset(str(shard), shardshuffle=False)).decode().to_tuple("cls")
    return opened.batched(size) if size else opened


class ForEachEpoch:
    """Creates a seeded pipeline for each epoch, which is the remedy that a refused resume names."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make, self._number = make, 0

    def set_epoch(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Any:
        return iter(self._make(self._number))


LOADERS: dict[str, Make] = {
    "DataLoader": lambda _, size: data_loader(size, shuffle=True),
    "DataLoader, seeded": lambda _, size: data_loader(
        size, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
    "DataLoader, weighted": lambda _, size: data_loader(
        size, sampler=data.WeightedRandomSampler(torch.linspace(0.1, 1, ROWS), ROWS)
    ),
    "DataLoader, batch_sampler and workers": lambda _, size: with_batch_sampler(size),
    "DataLoader, persistent workers": lambda _, size: data_loader(
        size, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "StatefulDataLoader": lambda _, size: stateful_data_loader(
        data.TensorDataset(torch.arange(ROWS)), size, shuffle=True
    ),
    "WebDataset": lambda folder, size: ForEachEpoch(
        lambda number: web_dataset(folder, size, lambda one: one.shuffle(20, rng=random.Random(number)))
    ),
    "WebDataset, shuffled": lambda folder, size: web_dataset(folder, size, lambda one: one.shuffle(20)),
    "Grain": grain,
    "Hugging Face": hugging_face,
}


def nodes(size: int | None, sampler: Any) -> Any:
    """A torchdata.nodes loader. Its state does not contain the order of the sampler."""
    library = pytest.importorskip("torchdata.nodes", reason="pip install torchdata --no-deps")
    rows = library.SamplerWrapper(sampler)
    return library.Loader(
        library.Mapper(library.Batcher(rows, size, drop_last=False), torch.tensor) if size else rows
    )


MORE: dict[str, Make] = {
    "nodes": lambda _, size: nodes(size, data.DistributedSampler(range(ROWS), 1, 0)),  # type: ignore[arg-type]
    "nodes, unseeded": lambda _, size: nodes(size, data.RandomSampler(range(ROWS))),
    "Hugging Face in a StatefulDataLoader": lambda folder, size: stateful_data_loader(
        hugging_face(folder, None), size
    ),
    "set_epoch": lambda _, size: ForEachEpoch(lambda number: numbers(random.Random(number), size)),
    "unseeded": lambda _, size: lambda: iter(numbers(random, size)),
}
REFUSED = {"WebDataset, shuffled", "nodes, unseeded", "unseeded"}
REMEDY = r"differs from the example in .*set_epoch\(epoch\).*it with seed=epoch.*pass a torch DataLoader"


def numbers(rng: Any, size: int | None) -> Any:
    rows = torch.tensor(rng.sample(range(ROWS), ROWS))
    return rows.split(size) if size else rows


def plain(batch: Any) -> Any:
    """Convert tensors and arrays to lists."""
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(part) for part in batch]
    return batch.tolist() if hasattr(batch, "tolist") else batch
