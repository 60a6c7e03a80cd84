"""Repeat examples while the next ones arrive from a slow store: ``python examples/slow_store.py``.

The store is a local tar file with a delay for each example. With ``factor="auto"``, EchoLoader measures R,
the ratio of reading time to training time. It repeats examples when training would otherwise wait for the
store.
"""

import io
import tarfile
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from adaecho import EchoLoader, TarShards

DELAY_S = 0.002  # delay of each read, and duration of each training step


def decode(example: dict[str, Any]) -> dict[str, Any]:
    time.sleep(DELAY_S)
    return {"x": np.frombuffer(example["raw"], dtype=np.uint8), "label": int(example["cls"])}


def write_shard(path: Path, examples: int) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(examples):
            for extension, content in (("raw", bytes([number]) * 64), ("cls", str(number % 10).encode())):
                member = tarfile.TarInfo(f"{number:04d}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder) / "train-00.tar", 200)
        shards = TarShards(f"{folder}/train-*.tar")  # or https://..., s3://...
        with EchoLoader(
            shards,
            16,
            decode=decode,
            echo="batch",
            factor="auto",
            shuffle_buffer=64,
            num_workers=2,
        ) as loader:
            for _ in islice(loader, 60):
                time.sleep(DELAY_S)  # the training step
            print(f"R {loader.R:.1f}, factor {loader.factor:.1f}")
            print(f"{loader.fresh_examples} examples read for 60 batches")


if __name__ == "__main__":
    main()
