"""Which share of a sweep's time goes to training, with workers that stay alive and with a process per trial.

One search of digits trials as people type it, then its first trials again, each in a process of its own,
which is what a plain launcher does; two at a time. The share is the trials' own training and evaluation
clocks over wall time times two: start-up, the Optuna export and the figure at the end included.
``--against CHECKOUT`` runs the same search with another checkout's code, in turns. Other work on the machine
lengthens every wall time; processor time, of all processes of a way, depends less on it.

Run: python -m benchmarks.search_overhead
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record

WORKERS = 2
SINGLE_TRIALS = 12
ROOT = Path(__file__).resolve().parents[1]
COMMON = ["task=digits", "tracking=none"]
# Typed, since another checkout's task may have other axes.
AXES = [
    "optimizer.learning_rate=tag(log, interval(0.005, 0.1))",
    "optimizer.momentum=tag(reverse_log, interval(0.5, 0.9))",
]

Points = list[dict[str, float]]


def sweep(folder: Path, trials: int, checkout: Path) -> None:
    """A search on ``WORKERS`` local workers."""
    settings = [f"search.trials={trials}", f"search.workers={WORKERS}", f"hydra.sweep.dir={folder}"]
    _run(["-m", *COMMON, *AXES, *settings], checkout)


def _points(folder: Path) -> Points:
    rows = json.loads((folder / "trials.json").read_text())
    return [row["hyperparameters"] for row in rows[:SINGLE_TRIALS]]


def processes(folder: Path, points: Points) -> None:
    """A process per trial, ``WORKERS`` at once."""

    def run(index: int) -> None:
        settings = [f"{key}={value}" for key, value in points[index].items()]
        _run([*COMMON, *settings, f"hydra.run.dir={folder}/{index}"])

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(run, range(len(points))))


def _row(way: str, folder: Path, wall_s: float, cpu_s: float) -> dict[str, Any]:
    summaries = [json.loads(path.read_text()) for path in folder.rglob("summary.json")]
    training_s = sum(summary["train_time_s"] + summary["eval_time_s"] for summary in summaries)
    return {
        "way": way,
        "trials": len(summaries),
        "wall_s": wall_s,
        "s_per_trial": WORKERS * wall_s / len(summaries),
        "cpu_s_per_trial": cpu_s / len(summaries),
        "steps_per_trial": sum(summary["steps"] for summary in summaries) / len(summaries),
        "training_s_per_trial": training_s / len(summaries),
        "training_share": training_s / (WORKERS * wall_s),
    }


def _run(arguments: list[str], checkout: Path = ROOT) -> None:
    command = [sys.executable, "-m", "adaecho.run", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=checkout, env=environment)


def _timed(way: str, folder: Path, run: Callable[[], Any]) -> dict[str, Any]:
    begin, begin_cpu_s = time.perf_counter(), _cpu_s_of_children()
    run()
    return _row(way, folder, time.perf_counter() - begin, _cpu_s_of_children() - begin_cpu_s)


def _cpu_s_of_children() -> float:
    """Of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100, help="of the search")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=1, help="of this checkout's search and the other's")
    typed = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        ways = {"workers that stay alive": ROOT} | (
            {"the same, of the other checkout": typed.against.resolve()} if typed.against else {}
        )
        for number in range(typed.rounds):
            for way, checkout in ways.items():
                folder = root / f"{number}" / way.replace(" ", "-").replace(",", "")
                rows.append(_timed(way, folder, partial(sweep, folder, typed.trials, checkout)))
        points = _points(next((root / "0").iterdir()))
        single = root / "single"
        rows.append(_timed("a process per trial", single, partial(processes, single, points)))
    record.show(rows)
    print(record.write("search_overhead", rows, packages=("torch", "hydra-core", "scipy")))


if __name__ == "__main__":
    main()
