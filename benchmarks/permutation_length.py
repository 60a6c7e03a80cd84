"""What a long source and a large buffer cost: first batch, memory, a state and a resume.

Each length and each buffer in a process of its own. The source has no examples in memory: a row's number is
the example. By length: seconds from making a loader to its first batch of 128, the same of a resume in the
middle of the first pass, memory that grew meanwhile, and rows a second over 200 further batches. Below
4,194,304 rows a permutation is drawn as an array, from there on computed row by row
(``adaecho/echo/order/permutation.py``). That limit comes from both ways forced at each length up to 30
million: ``both_ways`` in the record. By buffer, of 5 billion rows, the shuffle buffer full: seconds of
``state_dict`` and of a resume, which reads again what the buffer holds.

    python -m benchmarks.permutation_length
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from itertools import islice
from typing import Any

from benchmarks import record

LENGTHS = [10**5, 10**6, 4_194_303, 4_194_304, 10**7, 3 * 10**7, 10**9, 5 * 10**9]
BUFFERS = [10**3, 10**4, 10**5, 10**6]
LONGEST_DRAWN = 3 * 10**7
BATCH, BATCHES = 128, 200


class Rows:
    """A source as long as is wished: the example is its row."""

    thread_safe = True

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> int:
        return row

    def __getitems__(self, rows: list[int]) -> list[int]:
        return rows


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _resumed_s(make: Any, state: dict[str, Any]) -> float:
    begin = time.perf_counter()
    loader = make()
    loader.load_state_dict(state)
    next(iter(loader))
    spent = time.perf_counter() - begin
    loader.close()
    return spent


def of_length(length: int, method: str) -> dict[str, Any]:
    """One row, in this process; ``method`` is the one to force, or empty."""
    from adaecho import EchoLoader
    from adaecho.echo.order import permutation

    if method:
        permutation.LEAST_COMPUTED = 1 if method == "computed" else sys.maxsize
    with EchoLoader(Rows(1000), BATCH) as warm:
        next(iter(warm))  # what is imported and made once
    before = _peak_mib()
    begin = time.perf_counter()
    loader = EchoLoader(Rows(length), BATCH)
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in islice(batches, BATCHES):
        pass
    rows_per_s = BATCH * BATCHES / (time.perf_counter() - begin)
    state = loader.state_dict()
    loader.close()
    state["next_index"] = length // 2 // BATCH * BATCH
    resumed = _resumed_s(lambda: EchoLoader(Rows(length), BATCH), state)
    return {
        "length": length,
        "permutation": state.get("permutation", "drawn"),
        "first_batch_s": first,
        "resume_s": resumed,
        "grown_mib": _peak_mib() - before,
        "rows_per_s": rows_per_s,
    }


def of_buffer(buffer: int) -> dict[str, Any]:
    """One row, in this process."""
    from adaecho import EchoLoader

    def make() -> EchoLoader:
        return EchoLoader(
            Rows(max(LENGTHS)), BATCH, echo="example_before_augmentation", factor=2, shuffle_buffer=buffer
        )

    loader = make()
    begin = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - begin
    states = []
    for _ in range(5):
        next(batches)
        begin = time.perf_counter()
        state = loader.state_dict()
        states.append(time.perf_counter() - begin)
    loader.close()
    return {
        "shuffle_buffer": buffer,
        "first_batch_s": first,
        "state_s": statistics.median(states),
        "resume_s": _resumed_s(make, state),
    }


def _apart(argument: str, rounds: int) -> dict[str, Any]:
    """The median row of a few processes."""
    command = [sys.executable, "-m", "benchmarks.permutation_length", "--one", argument]
    found = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    ]
    return {
        key: statistics.median(row[key] for row in found) if isinstance(value, float) else value
        for key, value in found[0].items()
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, number, *method = arguments.one.split(":")
        row = of_length(int(number), *method) if kind == "length" else of_buffer(int(number))
        print(json.dumps(row))
        return
    rows = [_apart(f"length:{length}:", arguments.rounds) for length in LENGTHS]
    record.show(rows)
    forced = [
        _apart(f"length:{length}:{method}", arguments.rounds)
        for length in LENGTHS
        for method in ("drawn", "computed")
        if length <= LONGEST_DRAWN
    ]
    record.show(forced)
    buffers = [_apart(f"buffer:{buffer}", arguments.rounds) for buffer in BUFFERS]
    record.show(buffers)
    record.write("permutation_length", rows, packages=("torch", "numpy"), both_ways=forced, by_buffer=buffers)


if __name__ == "__main__":
    main()
