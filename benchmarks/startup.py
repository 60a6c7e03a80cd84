"""How long the command takes to print a config, and to do its first training step on digits.

Run: python -m benchmarks.startup
"""

import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import record

RUNS = 5
COMMANDS = {
    "--cfg job": ["--cfg", "job"],
    "first step on digits": ["max_steps=1", "tracking=none"],
}


def measure(arguments: list[str]) -> list[float]:
    """Wall seconds of the whole process, one warm-up not counted."""
    seconds = []
    for _ in range(RUNS + 1):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "adaecho.run", *arguments, f"hydra.run.dir={folder}/run"]
            begin = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def main() -> None:
    rows = []
    for name, arguments in COMMANDS.items():
        seconds = measure(arguments)
        rows.append(
            {
                "command": name,
                "median_s": statistics.median(seconds),
                "min_s": min(seconds),
                "max_s": max(seconds),
                "runs": RUNS,
            }
        )
    record.show(rows)
    print(record.write("startup", rows, packages=("torch", "hydra-core", "omegaconf")))


if __name__ == "__main__":
    main()
