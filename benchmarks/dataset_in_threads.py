"""Compare the speed of EchoLoader and DataLoader on datasets with and without ``thread_safe = True``.

EchoLoader reads a dataset with this attribute in two threads, and a dataset without it in two forked
processes. The loaders take turns on three datasets:

* lazy_file: records of a file that each process opens at its first read.
* photographs: JPEGs that are decoded in ``__getitem__``.
* slow_store: a store that takes 5 ms to answer.

lazy_file is not actually thread-safe, so the benchmark also counts the examples with wrong content.

    python -m benchmarks.dataset_in_threads
"""

import io
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from adaecho import EchoLoader
from benchmarks import record
from benchmarks.peers import sides

RECORD_BYTES, WORKERS, BATCH = 4096, 2, 32


class LazyFile:
    """A reader of fixed-size records, which opens its file at the first read."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __call__(self, row: int) -> Any:
        self.file = self.file or open(self.path, "rb")  # noqa: SIM115 (as in common datasets)
        self.file.seek(row * RECORD_BYTES)
        return np.frombuffer(bytearray(self.file.read(RECORD_BYTES)), dtype=np.int64)


class Photographs:
    """A reader that decodes the same JPEG at each read."""

    def __init__(self) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((500, 375)).save(file, "JPEG")
        self.encoded = file.getvalue()

    def __call__(self, row: int) -> Any:  # noqa: ARG002
        return np.array(Image.open(io.BytesIO(self.encoded)).resize((96, 96)))


def slow_store(row: int) -> Any:
    time.sleep(0.005)
    return np.full(8, row)


class Read(Dataset[Any]):
    """A dataset that reads its examples with a given function."""

    def __init__(self, read: Any, length: int, *, declared: bool) -> None:
        self.read, self.length, self.thread_safe = read, length, declared

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        return row, self.read(row)


def measure(way: str, read: Any, length: int) -> tuple[float, int]:
    """Return a loader's speed in examples per second, and the number of examples with wrong content."""
    dataset = Read(read, length, declared=way == "declared")
    loader: Any = (
        DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS)
        if way == "DataLoader"
        else EchoLoader(dataset, BATCH, epochs=1, num_workers=WORKERS)
    )
    number, wrong, start = 0, 0, 0.0
    for index, (rows, content) in enumerate(loader):
        if index == 4:
            start, number = time.perf_counter(), 0
        number += len(rows)
        if not isinstance(read, Photographs):
            wrong += int((content != rows[:, None]).any(1).sum())
    rate = number / (time.perf_counter() - start)
    if isinstance(loader, EchoLoader):
        loader.close()
    return rate, wrong


def main() -> None:
    options = record.options(__doc__, rounds=5).parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records"
        np.repeat(np.arange(20_000), RECORD_BYTES // 8).tofile(path)
        for kind, make, length in (
            ("lazy_file", partial(LazyFile, path), 20_000), ("photographs", Photographs, 1_000),
            ("slow_store", lambda: slow_store, 1_000),
        ):  # fmt: skip
            ways = ("DataLoader", "undeclared", "declared")
            turns = {way: partial(measure, way, make(), length) for way in ways}
            found = sides.take_turns(turns, options.rounds)
            rates = {way: [rate for rate, _ in found[way]] for way in ways}
            rows += [
                {
                    "dataset": kind,
                    "EchoLoader": way,
                    "examples_per_s": statistics.median(rates[way]),
                    "DataLoader_examples_per_s": statistics.median(rates["DataLoader"]),
                    "ratio": sides.ratio(rates[way], rates["DataLoader"]),
                    "wrong_examples": sum(wrong for _, wrong in found[way]),
                }
                for way in ways[1:]
            ]
    record.write("dataset_in_threads", rows, packages=("torch", "numpy", "pillow"))


if __name__ == "__main__":
    main()
