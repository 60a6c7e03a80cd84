"""Users' own code: undeclared datasets in worker processes, random datasets, silence, devices and bad data."""

import multiprocessing
import time
from typing import Any

from adaecho.echo.batch.process_workers import WorkerProcess


def test_a_worker_makes_batches_before_further_reads() -> None:
    """Batches need examples of all workers, so that one slow read would hold up every worker."""
    release = multiprocessing.get_context("fork").Event()
    order: list[str] = []

    def handler(what: str, name: str) -> list[str]:
        release.wait(20)
        order.append(name)
        return list(order)

    worker = WorkerProcess(lambda: handler, [], slots=1, slot_bytes=64)
    try:
        worker.start()
        worker.begin_receiving()
        tickets: dict[str, Any] = {
            name: worker.send(0, what, name)
            for what, name in [("read", "first"), ("read", "second"), ("made", "batch")]
        }
        time.sleep(0.5)  # the worker receives all three meanwhile
        release.set()
        assert worker.receive(tickets["second"])[1:] == ["batch", "second"]
        assert worker.receive(tickets["batch"])[-1] == "batch"  # in any order of receiving
    finally:
        worker.close()
