"""Steps a second of one process with two threads, and of two ranks with one thread each, on two cores.

The three ways take turns: one process (``threads=2``), two ranks, and two ranks whose gradients are never
reduced. What the last one saves is the share of time in reduction. Each turn is a run of its own; its clock
leaves out start-up, evaluation and the warm-up.

Run: python -m benchmarks.ranks
"""

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch.nn.parallel import DistributedDataParallel

from adaecho.config.schema import from_plain, to_plain
from adaecho.ranks import joined
from adaecho.run import CONF
from adaecho.training import trainer
from adaecho.training.trial import run_trial
from benchmarks import record

# The task's net on 128 images of 8x8 (a few ms a step), and on four times as many.
BATCHES = (128, 512)
STEPS = 150
TURNS = 5


def config(batch_size: int, threads: int) -> dict[str, Any]:
    overrides = [
        "task=digits", "tracking=none", "target.value=null", "device=cpu", "precision=float32", "echo=batch",
        "echo.factor=2", "evaluate.every_fresh_examples=1000000", f"max_steps={STEPS}",
        f"batch_size={batch_size}", f"threads={threads}",
    ]  # fmt: skip
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return to_plain(from_plain(to_plain(compose("config", overrides=overrides))))


def _rank(rank: int, ranks: int, port: int, plain: dict[str, Any], reduced: bool, out: Any) -> None:
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    if not reduced:
        step = trainer.Trainer._step

        def without(self: trainer.Trainer, batch: Any) -> None:
            model = self._synchronised
            assert isinstance(model, DistributedDataParallel)
            with model.no_sync():
                step(self, batch)

        trainer.Trainer._step = without  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, joined(torch.device("cpu"), 600) as joint:
        summary = run_trial(from_plain(plain), Path(folder) / "run", ranks=joint)
    if rank == 0:
        out.put(summary["train_time_s"] / summary["steps"])


def seconds_a_step(ranks: int, plain: dict[str, Any], *, reduced: bool = True) -> float:
    """Of one run on so many ranks."""
    context = multiprocessing.get_context("spawn")
    with contextlib.closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    out = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, plain, reduced, out)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    result: float = out.get(timeout=300)
    for process in processes:
        process.join()
    return result


def measure(batch_size: int, turns: int) -> dict[str, Any]:
    one, two = config(batch_size, threads=2), config(batch_size, threads=1)
    rows = [
        (seconds_a_step(1, one), seconds_a_step(2, two), seconds_a_step(2, two, reduced=False))
        for _ in range(turns)
    ]
    threads, ranks, _ = zip(*rows, strict=True)
    return {
        "batch_size": batch_size,
        "two_threads_ms_a_step": 1e3 * min(threads),
        "two_ranks_ms_a_step": 1e3 * min(ranks),
        "two_ranks_over_two_threads": statistics.median(b / a for a, b, _ in rows),
        "share_of_time_in_reduction": statistics.median(max(0.0, 1 - c / b) for _, b, c in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    given = parser.parse_args()
    rows = [measure(batch_size, given.turns) for batch_size in BATCHES]
    record.show(rows)
    print(record.write("ranks", rows))


if __name__ == "__main__":
    main()
