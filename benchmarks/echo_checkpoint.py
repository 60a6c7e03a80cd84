"""What a state costs with a million examples in the buffer, against another commit.

    git worktree add ../before COMMIT
    python -m benchmarks.echo_checkpoint --against ../before

* state_ms: median time of ``state_dict()``, at random distances of 100 to 400 batches of 1,000.
* in_buffer_ms: median time of ``fresh_examples_in_buffer``, which every evaluation asks for.
* batch_ms: median time of a batch meanwhile. Rare ones, at which a mark is kept, hardly count.

Each side runs in a process of its own; sides take turns.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record

BUFFER, BATCH_SIZE = 1_000_000, 1000


def measure(states: int, num_workers: int) -> dict[str, list[float]]:
    """Times in milliseconds."""
    from adaecho import EchoLoader

    rng = random.Random(0)
    source = {"x": np.zeros((4_000_000, 4), np.uint8)}
    times: dict[str, list[float]] = {"state_ms": [], "in_buffer_ms": [], "batch_ms": []}

    def clock(name: str, call: Any) -> None:
        start = time.perf_counter()
        call()
        times[name].append(1000 * (time.perf_counter() - start))

    with EchoLoader(
        source, BATCH_SIZE, echo="example_before_augmentation", factor=2.5, shuffle_buffer=BUFFER,
        num_workers=num_workers,
    ) as loader:  # fmt: skip
        batches = iter(loader)
        next(batches)
        for number in range(states):
            for _ in range(rng.randrange(100, 400)):
                clock("batch_ms", lambda: next(batches))
            with loader.paused():
                clock("state_ms", loader.state_dict)
                if number < 2:
                    clock("in_buffer_ms", lambda: loader.fresh_examples_in_buffer)
    return times


def side(folder: Path, states: int, num_workers: int) -> dict[str, list[float]]:
    """``measure`` in a process that imports the package of a checkout."""
    path = os.pathsep.join(map(str, (folder, record.FOLDER.parent)))
    done = subprocess.run(
        [sys.executable, Path(__file__).resolve(), "--measure", str(states), str(num_workers)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    times: dict[str, list[float]] = json.loads(done.stdout)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--states", type=int, default=8)
    parser.add_argument("--measure", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    sides = {"this commit": record.FOLDER.parent}
    if arguments.against is not None:
        commit = ["git", "-C", str(arguments.against), "rev-parse", "--short", "HEAD"]
        name = subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip()
        sides[name] = arguments.against.resolve()
    rows = []
    for num_workers in (0, 1):
        times: dict[str, list[dict[str, list[float]]]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, folder in sides.items():
                times[name].append(side(folder, arguments.states, num_workers))
        for name, found in times.items():
            row: dict[str, Any] = {"case": f"{num_workers} workers", "side": name}
            for key in found[0]:
                row[key] = statistics.median(value for one in found for value in one[key])
            rows.append(row)
    record.show(rows)
    record.write("echo_checkpoint", rows)


if __name__ == "__main__":
    main()
