"""Measure the memory of a large shuffle buffer, relative to the raw size of its examples.

The buffer has 10^6 augmented examples of 128 int32 numbers. Once the number of distinct examples in the
buffer is stable, the benchmark also measures how much the memory of the process still grows.

    python -m benchmarks.echo_memory
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from adaecho import EchoLoader
from benchmarks import record

LENGTH, BATCH_SIZE = 128, 128


class Copy:
    """A vectorized augmentation that returns its input, so it costs almost nothing."""

    def block(self, fields: dict[str, Any], keys: Any) -> dict[str, Any]:  # noqa: ARG002
        return fields


def resident_bytes() -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
    )
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--buffer", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=100_000)
    arguments = parser.parse_args()
    rows = []
    for factor in (1, 2):
        # The source needs almost no memory, because all its rows are views of the same row.
        source = {"tokens": np.broadcast_to(np.zeros(LENGTH, np.int32), (2_000_000, LENGTH))}
        before = resident_bytes()
        loader = EchoLoader(
            source, BATCH_SIZE, echo="example_after_augmentation", factor=factor, augment=Copy(),
            shuffle_buffer=arguments.buffer, order="sequential",
        )  # fmt: skip
        batches = iter(loader)
        # The number of distinct examples approaches its equilibrium exponentially, with a time constant of
        # one buffer length.
        for _ in range(8 * arguments.buffer // BATCH_SIZE):
            next(batches)
        settled = resident_bytes()
        for _ in range(arguments.batches):
            next(batches)
        raw = arguments.buffer * LENGTH * 4
        rows.append(
            {
                "factor": factor,
                "raw_mib": raw / 2**20,
                "ratio_to_raw": (settled - before) / raw,
                "batches_after": arguments.batches,
                "growth_mib": (resident_bytes() - settled) / 2**20,
            }
        )
        loader.close()
        del loader, batches
    record.write("echo_memory", rows)


if __name__ == "__main__":
    main()
