"""Ways for several threads to read a map-style dataset that is not made for them, side by side.

* ``shared``: all threads use the one object, which is wrong for datasets that keep an open file.
* ``copies``: each thread has an unpickled copy, EchoLoader's default.
* ``turns``: one thread reads at a time, EchoLoader's way where a dataset can't be copied.
* ``processes``: torch's DataLoader workers, forked, giving examples one by one to EchoLoader.

Three kinds of dataset: records of a file that is opened when first needed; JPEG photographs decoded in
``__getitem__``; a store that answers after 5 ms. Examples per second of wall time after the first batches,
the best of three runs each, and of the lazily opened file how many examples were wrong in all runs.

    python -m benchmarks.dataset_in_threads
"""

import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from adaecho import EchoLoader
from benchmarks.record import show, write

RECORD_BYTES = 4096
NUM_WORKERS = 2
BATCH = 32
RUNS = 3


class LazyFile(Dataset[Any]):
    """Records of a file that is opened when first needed."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length
        self.file: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115 (as such datasets have it)
        self.file.seek(row * RECORD_BYTES)
        return row, np.frombuffer(self.file.read(RECORD_BYTES), dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "file": None}


class Photographs(Dataset[Any]):
    """JPEG files in memory, decoded as they are read."""

    def __init__(self, length: int) -> None:
        self.length = length
        pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((500, 375)).save(file, "JPEG")
        self.encoded = file.getvalue()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        return row, np.asarray(Image.open(io.BytesIO(self.encoded)).resize((96, 96)))


class SlowStore(Dataset[Any]):
    """Answers after a while."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.005)
        return row, np.full(8, row)


class Shared(Dataset[Any]):
    """Says that threads may share what it wraps, whether that is so or not."""

    thread_safe = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[row]


class Turns(Shared):
    """Can't be pickled."""

    thread_safe = False

    def __getstate__(self) -> Any:
        raise TypeError("on purpose")


def loader_of(way: str, dataset: Any) -> EchoLoader:
    """A loader that reads in one of the ways."""
    if way == "processes":
        examples = DataLoader(dataset, batch_size=None, num_workers=NUM_WORKERS)
        return EchoLoader(examples, BATCH, epochs=1, num_workers=1)
    wrapped = {"shared": Shared, "copies": lambda one: one, "turns": Turns}[way](dataset)
    return EchoLoader(wrapped, BATCH, epochs=1, num_workers=NUM_WORKERS)


def measure(way: str, dataset: Any, *, numbered: bool) -> tuple[float, int | None]:
    """Examples per second after the start, and how many were wrong."""
    seen, wrong, start = 0, 0, 0.0
    with loader_of(way, dataset) as loader:
        for number, (rows, content) in enumerate(loader):
            if number == 4:
                start, seen = time.perf_counter(), 0
            seen += len(rows)
            if numbered:
                wrong += int((content != rows[:, None]).any(1).sum())
        return seen / (time.perf_counter() - start), wrong if numbered else None


def main() -> None:
    """Measure all and write the record."""
    torch.set_num_threads(1)
    results: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records"
        np.repeat(np.arange(4000), RECORD_BYTES // 8).tofile(path)
        makers: dict[str, Any] = {
            "lazy_file": lambda: LazyFile(path, 4000),
            "photographs": lambda: Photographs(600),
            "slow_store": lambda: SlowStore(600),
        }
        for _ in range(RUNS):
            for kind, make in makers.items():
                for way in ("shared", "copies", "turns", "processes"):
                    rate, wrong = measure(way, make(), numbered=kind == "lazy_file")
                    row = results.setdefault(
                        (kind, way),
                        {"dataset": kind, "way": way, "num_workers": NUM_WORKERS, "examples_per_s": 0.0},
                    )
                    row["examples_per_s"] = round(max(rate, row["examples_per_s"]), 1)
                    row["wrong_examples"] = None if wrong is None else wrong + row.get("wrong_examples", 0)
    rows = list(results.values())
    show(rows)
    write("dataset_in_threads", rows, packages=("torch", "numpy", "pillow"))


if __name__ == "__main__":
    main()
