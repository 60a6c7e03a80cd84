"""Compare EchoLoader with DataLoader for an augmentation in plain Python, which holds the GIL.

The loaders have two workers, and take turns on dicts of eight numbers, small images (32x32) and large images
(224x224). The augmentation takes 100 microseconds per example. EchoLoader runs it in threads if it declares
``thread_safe = True``, and in forked processes otherwise. With e = 2, EchoLoader reads each example once and
augments it twice.

    python -m benchmarks.python_augment
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from adaecho import EchoLoader
from benchmarks import record
from benchmarks.peers import sides

KIND, WORKERS, BUSY_S = sides.Kind(64, 16), 2, 100e-6
E2: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 512}


def busy(loops: int) -> float:
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
    """Shift the numbers of an example, or flip its image, after ``BUSY_S`` seconds of pure Python."""
    shift = busy(LOOPS) * 0 + rng.random()
    if isinstance(example, dict):
        return {name: value + np.float32(shift) for name, value in example.items()}
    return example[:, ::-1].copy() if shift < 0.5 else example


class Declared:
    """The function ``augment``, declared safe for threads to call."""

    thread_safe = True

    def __call__(self, example: Any, rng: Any) -> Any:
        return augment(example, rng)


class InMemory(Dataset[Any]):
    """A map-style dataset of arrays in memory."""

    def __init__(self, kind: str, *, augmented: bool = False, declared: bool = False) -> None:
        rng, self.augmented, self.thread_safe = np.random.default_rng(0), augmented, declared
        if kind == "dict of 8":
            self.fields = {f"field {n}": rng.random(20_000, dtype=np.float32) for n in range(8)}
        else:
            size, length = (32, 20_000) if kind == "32x32" else (224, 2_000)
            self.fields = {"image": rng.integers(0, 255, (length, size, size, 3), dtype=np.uint8)}

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, row: int) -> Any:
        example: Any = {name: values[row] for name, values in self.fields.items()}
        example = example.get("image", example)
        return augment(example, np.random) if self.augmented else example


def data_loader(kind: str) -> sides.Batches:
    loader = DataLoader(
        InMemory(kind, augmented=True), KIND.batch_size, shuffle=True, num_workers=WORKERS, drop_last=True,
        persistent_workers=True,
    )  # fmt: skip
    while True:
        yield from loader


def echo_loader(kind: str, *, declared: bool = False, **echo: Any) -> EchoLoader:
    return EchoLoader(
        InMemory(kind, declared=declared), KIND.batch_size, augment=Declared() if declared else augment,
        num_workers=WORKERS, **echo,
    )  # fmt: skip


def measure(kind: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure all loaders in turn, and return one row for each configuration of EchoLoader."""
    loaders = {
        "undeclared": echo_loader(kind), "undeclared, e=2": echo_loader(kind, **E2),
        "declared": echo_loader(kind, declared=True), "declared, e=2": echo_loader(kind, declared=True, **E2),
    }  # fmt: skip
    running = {"DataLoader": data_loader(kind)} | {way: iter(loader) for way, loader in loaders.items()}
    for batches in running.values():  # start all sides, so that processes are forked before threads start
        next(batches)
    turns: dict[str, Callable[[], sides.Rates]] = {
        way: partial(sides.rates, batches, seconds, KIND) for way, batches in running.items()
    }
    found = {way: [one.per_s for one in turn] for way, turn in sides.take_turns(turns, rounds).items()}
    for loader in loaders.values():
        loader.close()
    rows = []
    for way in loaders:
        ratios = [a / b for a, b in zip(found[way], found["DataLoader"], strict=True)]
        row = {"examples": kind, "EchoLoader": way, "examples_per_s": statistics.median(found[way])}
        row |= {"DataLoader_examples_per_s": statistics.median(found["DataLoader"])}
        row |= {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        rows.append(row)
    return rows


def main() -> None:
    options = record.options(__doc__, rounds=7, seconds=1.5).parse_args()
    torch.set_num_threads(1)
    kinds = ("dict of 8", "32x32", "224x224")
    rows = [row for kind in kinds for row in measure(kind, options.rounds, options.seconds)]
    record.write("python_augment", rows)


if __name__ == "__main__":
    main()
