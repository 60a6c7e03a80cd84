"""An augmentation in plain Python, which holds the interpreter's lock: processes, threads and a DataLoader.

Three kinds of examples: a dict of eight numbers, small images (32x32) and large ones (224x224). The
augmentation takes 100 microseconds of Python for each. Batches of 64, two workers; a row of the table is one
of several turns in one run, in which all ways follow one another; shares are medians of those of each turn.
With e = 2 each example read is augmented twice: DataLoader has nothing like it, and reads again.

    python -m benchmarks.python_augment [SECONDS] [TURNS]
"""

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from adaecho import EchoLoader
from benchmarks.record import show, write

BATCH, WORKERS, BUSY_S, WARM_UP = 64, 2, 100e-6, 16


def busy(loops: int) -> float:
    """Python that does nothing else."""
    value = 1.0
    for _ in range(loops):
        value = value * 1.0000001 + 1e-9
    return value


def _loops() -> int:
    times = []
    for _ in range(20):
        start = time.process_time()
        busy(20_000)
        times.append(time.process_time() - start)
    return int(20_000 * BUSY_S / min(times))


LOOPS = _loops()


def augment(example: Any, rng: Any) -> Any:
    """Shift numbers, or flip an image."""
    shift = busy(LOOPS) * 0 + rng.random()
    if isinstance(example, dict):
        return {name: value + np.float32(shift) for name, value in example.items()}
    return example[:, ::-1].copy() if shift < 0.5 else example


class Rows(Dataset[Any]):
    """Arrays in memory, as a map-style dataset."""

    def __init__(self, kind: str, *, augmented: bool = False) -> None:
        draws, self.augmented = np.random.default_rng(0), augmented
        self.images = self.numbers = None
        if kind == "dict of 8":
            self.numbers = {f"field {n}": draws.random(20_000, dtype=np.float32) for n in range(8)}
        else:
            size, length = (32, 20_000) if kind == "32x32" else (224, 2_000)
            self.images = draws.integers(0, 255, (length, size, size, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return 20_000 if self.images is None else len(self.images)

    def __getitem__(self, row: int) -> Any:
        if self.numbers is not None:
            example: Any = {name: values[row] for name, values in self.numbers.items()}
        else:
            assert self.images is not None
            example = self.images[row]
        return augment(example, np.random) if self.augmented else example


def endless(loader: Any) -> Iterator[Any]:
    """Its batches, pass after pass."""
    while True:
        yield from loader


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Examples per second, after the first batches."""
    for _ in range(WARM_UP):
        next(batches)
    start, number = time.perf_counter(), 0
    while (taken := time.perf_counter() - start) < seconds:
        next(batches)
        number += 1
    return number * BATCH / taken


def rates(plain: Rows, augmented: Rows, seconds: float) -> dict[str, float]:
    """Of each way, once."""
    data_loader = DataLoader(augmented, BATCH, shuffle=True, num_workers=WORKERS, drop_last=True)
    found = {"DataLoader": rate(endless(data_loader), seconds)}
    e2: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 512}
    ways: dict[str, dict[str, Any]] = {
        "threads": {}, "processes": {"processes": True}, "processes, e=2": {"processes": True, **e2},
    }  # fmt: skip
    for way, arguments in ways.items():
        with EchoLoader(plain, BATCH, augment=augment, num_workers=WORKERS, **arguments) as loader:
            found[way] = rate(iter(loader), seconds)
    return found


def main() -> None:
    """Measure all and write the record."""
    torch.set_num_threads(1)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    rows = []
    for kind in ("dict of 8", "32x32", "224x224"):
        plain, augmented = Rows(kind), Rows(kind, augmented=True)
        found = [rates(plain, augmented, seconds) for _ in range(turns)]
        base = statistics.median(turn["DataLoader"] for turn in found)
        row: dict[str, Any] = {"examples": kind, "DataLoader, examples_per_s": round(base)}
        for way in ("threads", "processes", "processes, e=2"):
            shares = [turn[way] / turn["DataLoader"] for turn in found]
            row[f"{way}, x DataLoader"] = round(statistics.median(shares), 2)
            row[f"{way}, lowest and highest"] = [round(min(shares), 2), round(max(shares), 2)]
        rows.append(row)
    show(rows)
    write("python_augment", rows, packages=("torch", "numpy"))


if __name__ == "__main__":
    main()
