"""Small tar shards and their contents."""

import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.datasets.files import write_tar

NUM_EXAMPLES = 23


def contents(number: int) -> dict[str, bytes]:
    """An example: bytes of varying length, and a label."""
    rng = np.random.default_rng(number)
    return {"bin": rng.bytes(int(rng.integers(1, 3000))), "cls": str(number).encode()}


def write_shard(
    path: Path, numbers: list[int], *, format: int = tarfile.USTAR_FORMAT, prefix: str = ""
) -> None:
    files = [
        (number, extension, content) for number in numbers for extension, content in contents(number).items()
    ]
    write_tar(
        path, [(f"{prefix}{number:05d}.{end}", content) for number, end, content in files], format=format
    )


def write_shards(folder: Path, shards: int, examples: int) -> list[str]:
    """Write shards of different lengths with so many examples in all; returns their names."""
    cuts = np.random.default_rng(0).choice(np.arange(1, examples), shards - 1, replace=False)
    names = [f"shard-{shard:03d}.tar" for shard in range(shards)]
    for name, (begin, end) in zip(names, pairwise([0, *sorted(cuts.tolist()), examples]), strict=True):
        write_shard(folder / name, list(range(begin, end)))
    return names


def number_of(example: dict[str, object]) -> int:
    """The number of an example, whose contents are checked."""
    label = example["cls"]
    assert isinstance(label, bytes)
    number = int(label)
    assert example == {"__key__": example["__key__"], **contents(number)}
    assert str(example["__key__"]).endswith(f"{number:05d}")
    return number


def urls(place: str | Path) -> str:
    return f"{str(place).rstrip('/')}/shard-{{000..003}}.tar"


def label_alone(example: dict[str, Any]) -> dict[str, Any]:
    return {"label": number_of(example)}


label_alone.thread_safe = True  # type: ignore[attr-defined]


def labels(batches: Any) -> list[int]:
    return [label for batch in batches for label in batch["label"].tolist()]
