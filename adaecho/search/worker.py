"""A worker process: imports torch once, then runs one trial after the other.

It reads jobs as JSON lines from stdin and answers on what was stdout; whatever a trial prints goes to its
log. When its launcher is gone, stdin ends and the worker takes its whole process group with it, in mid-trial
if need be: a run folder is safe to kill at any instant, and a trial left behind would hold its lock.
"""

import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from adaecho.errors import UserError
from adaecho.search.execute import execute

Job = dict[str, Any]
RUN_TRIAL = "adaecho.training.trial:run_trial"


def main(runner: str, worker: int) -> None:
    """Serve jobs until told to stop.

    Args:
        runner: ``module:function`` with the signature of ``run_trial``.
        worker: its number among its siblings; spreads them over the GPUs of this host.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    module, _, function = runner.partition(":")
    run_trial = getattr(importlib.import_module(module), function)
    _choose_gpu(worker)
    answers.write(json.dumps({"ready": True}) + "\n")
    while (job := jobs.get()) is not None:
        answers.write(json.dumps(_answer(run_trial, job)) + "\n")


def _answer(run_trial: Any, job: Job) -> dict[str, Any]:
    try:
        summary = execute(run_trial, job["config"], Path(job["folder"]), job["overrides"], job["group"])
    except UserError as error:
        return {"error": str(error), "users": True}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "users": False}
    return {"status": summary["status"]}


def _read_jobs(jobs: "queue.SimpleQueue[Job | None]") -> None:
    for line in sys.stdin:
        job = json.loads(line)
        jobs.put(job)
        if job is None:
            return
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _choose_gpu(worker: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(worker % torch.cuda.device_count())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
