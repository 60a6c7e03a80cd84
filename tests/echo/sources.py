"""Small sources for the tests, with reference augmentations."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from adaecho import EchoLoader
from adaecho.echo.order import keyed
from tests.echo import mini_loader

VARIANTS: list[dict[str, Any]] = [
    {"echo": "none"},
    {"echo": "example_before_augmentation", "factor": 1},
    {"echo": "example_before_augmentation", "factor": 2},
    {"echo": "example_before_augmentation", "factor": 2.6},
    {"echo": "example_after_augmentation", "factor": 3},
    {"echo": "example_after_augmentation", "factor": 1.3},
    {"echo": "batch", "factor": 1},
    {"echo": "batch", "factor": 2},
    {"echo": "batch", "factor": 2.5, "batch_shuffle_buffer": 3},
]
IDS = ["-".join(str(value) for value in variant.values()) for variant in VARIANTS]


def labels(loader: Iterable[Any], batches: int | None = None) -> list[list[int]]:
    return [batch["label"].tolist() for batch in islice(loader, batches)]


def example(row: int) -> dict[str, Any]:
    return {"x": np.array([float(row), -float(row)]), "label": row}


def ragged(row: int) -> dict[str, Any]:
    """Examples have different shapes until augment."""
    return {"x": np.arange(float(row % 4 + 2)) + row, "label": row}


class Dataset:
    thread_safe = True

    def __init__(self, length: int, make: Any = example) -> None:
        self.reads = 0
        self.examples = [make(row) for row in range(length)]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.reads += 1
        return self.examples[row]


class Broken(Dataset):
    def __init__(self, length: int, *bad: int, error: type[Exception] = ValueError) -> None:
        super().__init__(length)
        self.bad, self.error = bad, error

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row in self.bad:
            raise self.error(f"cannot decode {row}")
        return super().__getitem__(row)


class Halting(Dataset):
    """Waits at one row until ``go`` is set."""

    def __init__(self, length: int, at: int) -> None:
        super().__init__(length)
        self.at, self.reading, self.go = at, threading.Event(), threading.Event()

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row == self.at:
            self.reading.set()
            self.go.wait(200)
        return super().__getitem__(row)


class Bad:
    """A decode function that fails for some rows."""

    thread_safe = True

    def __init__(self, *rows: int) -> None:
        self.rows = frozenset(rows)

    def __call__(self, one: dict[str, Any]) -> dict[str, Any]:
        if int(one["label"]) in self.rows:
            raise ValueError(f"cannot decode {one['label']}")
        return one


class Stream:
    def __init__(self, length: int, make: Any = example) -> None:
        self.reads = 0
        self.examples = [make(row) for row in range(length)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for one in self.examples:
            self.reads += 1
            yield one


def arrays(length: int) -> dict[str, Any]:
    rows = np.arange(length)
    return {"x": np.stack([rows, -rows], axis=1).astype(float), "label": rows}


def memory_map(fields: dict[str, Any]) -> dict[str, Any]:
    """The same arrays as memory maps of temporary files."""
    mapped = {}
    for name, array in fields.items():
        with tempfile.TemporaryFile() as file:
            array.tofile(file)
            file.flush()
            mapped[name] = np.memmap(file, array.dtype, "r", shape=array.shape)
    return mapped


class AddNoise:
    def block(self, fields: dict[str, Any], item_keys: Any) -> dict[str, Any]:
        return {**fields, "x": fields["x"] + keyed.uniform(item_keys, 0)[:, None]}


def reference_block(one: dict[str, Any], key: int) -> dict[str, Any]:
    return {**one, "x": one["x"] + mini_loader.uniform(key, 0)}


def add_noise(one: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Add noise to two numbers of an example."""
    return {**one, "x": one["x"][:2] + rng.random()}


add_noise.thread_safe = True  # type: ignore[attr-defined]


def reference_single(one: dict[str, Any], key: int) -> dict[str, Any]:
    return add_noise(one, np.random.Generator(np.random.Philox(key=key)))


SOURCES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    # name: source by length, augment, reference augment, further arguments
    "arrays": (arrays, AddNoise(), reference_block, {}),
    "memory map": (lambda length: memory_map(arrays(length)), AddNoise(), reference_block, {}),
    "map": (Dataset, add_noise, reference_single, {}),
    "ragged": (lambda length: Dataset(length, ragged), add_noise, reference_single, {}),
    "stream": (Stream, add_noise, reference_single, {"order": "sequential"}),
}


def reference_examples(kind: str, length: int) -> list[dict[str, Any]]:
    return [(ragged if kind == "ragged" else example)(row) for row in range(length)]


def soon(comes: Callable[[], object]) -> bool:
    """Wait up to two minutes for a condition."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not comes():
        time.sleep(0.005)
    return bool(comes())


def held_serials(loader: EchoLoader) -> list[int]:
    """Serials of the buffered items at the cursor of the consumer."""
    serials: list[int] = loader._pipeline.streams.held(loader._position).serials.tolist()
    return serials
