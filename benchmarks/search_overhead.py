"""Measure how much of its time a hyperparameter search spends on training.

The benchmark runs one search on the task digits. Its two worker processes stay alive between trials. For
comparison, the benchmark repeats the first trials, each in a new process, two at a time.

Because two trials run at a time, the time available for trials is twice the wall time. The reported share is
the training and evaluation time of all trials, divided by the available time. Other work on the machine
lengthens the wall time, so the benchmark also reports CPU time.

Run: python -m benchmarks.search_overhead
"""

import argparse
import json
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
Points = list[dict[str, float]]


def sweep(folder: Path, trials: int) -> None:
    """Run a hyperparameter search with ``WORKERS`` local processes, which stay alive between trials."""
    settings = [f"search.trials={trials}", f"search.workers={WORKERS}", f"hydra.sweep.dir={folder}"]
    _run(["-m", *COMMON, *settings])


def _points(folder: Path) -> Points:
    rows = json.loads((folder / "trials.json").read_text())
    return [row["hyperparameters"] for row in rows[:SINGLE_TRIALS]]


def processes(folder: Path, points: Points) -> None:
    """Run each trial in a new process, ``WORKERS`` at a time."""

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


def _run(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "adaecho.run", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def _timed(way: str, folder: Path, run: Callable[[], Any]) -> dict[str, Any]:
    begin, begin_cpu_s = time.perf_counter(), _cpu_s_of_children()
    run()
    return _row(way, folder, time.perf_counter() - begin, _cpu_s_of_children() - begin_cpu_s)


def _cpu_s_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100, help="trials of the search (%(default)s)")
    trials = parser.parse_args().trials
    with tempfile.TemporaryDirectory() as temporary:
        searched, single = Path(temporary) / "searched", Path(temporary) / "single"
        rows = [_timed("workers that stay alive", searched, partial(sweep, searched, trials))]
        points = _points(searched)
        rows.append(_timed("a process per trial", single, partial(processes, single, points)))
    record.write("search_overhead", rows, packages=("torch", "hydra-core", "scipy"))


if __name__ == "__main__":
    main()
