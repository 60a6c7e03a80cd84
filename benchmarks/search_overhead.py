"""Which share of a sweep's time goes to training, with workers that stay alive and with a process per trial.

Both run the same digits trials, two at a time; a process per trial is what a plain launcher does. The share
is the trials' own training and evaluation clocks over wall time times two, start-up included.

Run: python -m benchmarks.search_overhead
"""

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import record

WORKERS = 2
TRIALS = 60
SINGLE_TRIALS = 12
COMMON = ["task=digits", "tracking=none", "optimizer.learning_rate=0.02", "optimizer.momentum=0.8"]


def sweep(folder: Path) -> None:
    """``TRIALS`` repeats of one arm on ``WORKERS`` local workers."""
    settings = [f"search.repeats={TRIALS}", f"search.workers={WORKERS}", f"hydra.sweep.dir={folder}"]
    _run(["-m", *COMMON, *settings])


def processes(folder: Path) -> None:
    """A process per trial, ``WORKERS`` at once."""

    def run(seed: int) -> None:
        _run([*COMMON, f"seed={seed}", f"hydra.run.dir={folder}/{seed}"])

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(run, range(SINGLE_TRIALS)))


def _run(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "adaecho.run", *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    rows = []
    for name, run in (("workers that stay alive", sweep), ("a process per trial", processes)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "runs"
            begin = time.perf_counter()
            run(folder)
            wall_s = time.perf_counter() - begin
            summaries = [json.loads(path.read_text()) for path in folder.rglob("summary.json")]
        training_s = sum(summary["train_time_s"] + summary["eval_time_s"] for summary in summaries)
        rows.append(
            {
                "way": name,
                "trials": len(summaries),
                "wall_s": wall_s,
                "s_per_trial": WORKERS * wall_s / len(summaries),
                "training_s_per_trial": training_s / len(summaries),
                "training_share": training_s / (WORKERS * wall_s),
            }
        )
    record.show(rows)
    print(record.write("search_overhead", rows, packages=("torch", "hydra-core", "scipy")))


if __name__ == "__main__":
    main()
