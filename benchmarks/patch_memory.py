"""Memory of a buffer of volumes against one of the patches that are cut from them, and the time of a batch.

Volumes of 96^3 float32 (3.4 MiB) read from .npy files; patches of 32^3 (131 kB), e = 8, batches of 8, a
buffer of 300, two threads. Each place in a process of its own: peak resident memory beyond that before the
loader was made, and seconds a batch once the buffer is full. The batches are the same, which is checked.

    python -m benchmarks.patch_memory
"""

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record

SIDE, PATCH, VOLUMES = 96, 32, 400
FACTOR, BATCH, BUFFER, BATCHES = 8, 8, 300, 300


class Volumes:
    """Files of one volume each; all are copies of one, which costs no less to read."""

    thread_safe = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return VOLUMES

    def __getitem__(self, row: int) -> dict[str, Any]:
        volume = np.load(self._folder / f"{row % 8}.npy")
        volume[0, 0, 0] = row
        return {"image": volume}


def cut(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A patch at a random corner."""
    z, y, x = rng.integers(0, SIDE - PATCH + 1, 3)
    return {"image": example["image"][z : z + PATCH, y : y + PATCH, x : x + PATCH]}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def of_place(place: str, folder: Path) -> dict[str, Any]:
    """One row, in this process."""
    from adaecho import EchoLoader

    before, digest = _peak_mib(), hashlib.sha256()
    with EchoLoader(
        Volumes(folder), BATCH, echo="example_before_augmentation", factor=FACTOR, shuffle_buffer=BUFFER,
        augment=cut, place=place, num_workers=2,
    ) as loader:  # fmt: skip
        batches = iter(loader)
        digest.update(next(batches)["image"].numpy().tobytes())
        begin = time.perf_counter()
        for batch in islice(batches, BATCHES):
            digest.update(batch["image"].numpy().tobytes())
        seconds = time.perf_counter() - begin
        read = loader.fresh_examples
    return {
        "place": place,
        "volumes_read": read,
        "grown_mib": _peak_mib() - before,
        "batch_s": seconds / BATCHES,
        "digest": digest.hexdigest(),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(of_place(arguments.one[0], Path(arguments.one[1]))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(8):
            volume = np.random.default_rng(number).normal(size=(SIDE, SIDE, SIDE)).astype(np.float32)
            np.save(Path(folder) / f"{number}.npy", volume)
        for place in ("decoded", "augmented"):
            command = [sys.executable, "-m", "benchmarks.patch_memory", "--one", place, folder]
            rows.append(
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            )
    assert len({row.pop("digest") for row in rows}) == 1, "the batches differ"
    record.show(rows)
    record.write("patch_memory", rows)


if __name__ == "__main__":
    main()
