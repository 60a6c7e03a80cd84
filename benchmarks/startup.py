"""Measure how many seconds the training command takes to print its config, or to take its first step.

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
    """Run the training command several times, and return the seconds until its last line of output."""
    seconds = []
    for _ in range(RUNS + 1):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "adaecho.run", *arguments, f"hydra.run.dir={folder}/run"]
            begin = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                for _ in process.stdout:
                    last = time.perf_counter()
            if process.returncode:
                raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
            seconds.append(last - begin)
    return seconds[1:]  # the first run warms up


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
    record.write("startup", rows, packages=("torch", "hydra-core", "omegaconf"))


if __name__ == "__main__":
    main()
