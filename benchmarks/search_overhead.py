"""Which share of a sweep's time goes to training, with workers that stay alive and with a process per trial.

One search of 100 digits trials as people type it, then its first trials again, each in a process of its
own, which is what a plain launcher does; two at a time. The share is the trials' own training and evaluation
clocks over wall time times two: start-up, the Optuna mirror and the figure at the end included.

Run: python -m benchmarks.search_overhead
"""

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import record

WORKERS = 2
TRIALS = 100
SINGLE_TRIALS = 12
COMMON = ["task=digits", "tracking=none"]

Points = list[dict[str, float]]


def sweep(folder: Path) -> Points:
    """A search over the task's own axes on ``WORKERS`` local workers; its first points."""
    settings = [f"search.trials={TRIALS}", f"search.workers={WORKERS}", f"hydra.sweep.dir={folder}"]
    _run(["-m", *COMMON, *settings])
    rows = json.loads((folder / "trials.json").read_text())
    return [row["hyperparameters"] for row in rows[:SINGLE_TRIALS]]


def processes(folder: Path, points: Points) -> None:
    """A process per trial, ``WORKERS`` at once."""

    def run(index: int) -> None:
        settings = [f"{key}={value}" for key, value in points[index].items()]
        _run([*COMMON, *settings, f"hydra.run.dir={folder}/{index}"])

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(run, range(len(points))))


def _row(way: str, folder: Path, wall_s: float) -> dict[str, Any]:
    summaries = [json.loads(path.read_text()) for path in folder.rglob("summary.json")]
    training_s = sum(summary["train_time_s"] + summary["eval_time_s"] for summary in summaries)
    return {
        "way": way,
        "trials": len(summaries),
        "wall_s": wall_s,
        "s_per_trial": WORKERS * wall_s / len(summaries),
        "training_s_per_trial": training_s / len(summaries),
        "training_share": training_s / (WORKERS * wall_s),
    }


def _run(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "adaecho.run", *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        alive, single = Path(temporary) / "alive", Path(temporary) / "single"
        begin = time.perf_counter()
        points = sweep(alive)
        middle = time.perf_counter()
        processes(single, points)
        end = time.perf_counter()
        rows = [
            _row("workers that stay alive", alive, middle - begin),
            _row("a process per trial", single, end - middle),
        ]
    record.show(rows)
    print(record.write("search_overhead", rows, packages=("torch", "hydra-core", "scipy")))


if __name__ == "__main__":
    main()
