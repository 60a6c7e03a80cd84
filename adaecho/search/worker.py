"""Run one worker of a sweep, which runs missing trials until none are left.

::

    python -m adaecho.search.worker SWEEP_FOLDER

``design.json`` defines the trials, and the run folders contain their state. While a worker runs a trial, it
locks the trial's run folder. Workers need no further coordination, so any number of them can run, on all
hosts that share the folder. If a worker is killed, another one continues its trial.
"""

import argparse
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from adaecho.config.schema import from_plain
from adaecho.errors import RankError, UserError, print_line, report_errors
from adaecho.records.environment import environment
from adaecho.records.files import append, read_json
from adaecho.records.folder import STALE_AFTER_S, FolderInUseError, RunFolder
from adaecho.records.trials import FINISHED, Status
from adaecho.search.design import Design, TrialId, read_design
from adaecho.search.state import SweepState, cannot_win
from adaecho.training.signals import WaitEndedError

MAX_ATTEMPTS = 3  # maximum number of attempts to run a trial
ATTEMPTS = "attempts.log"  # has one line for each attempt that crashed or is still running
# How long a worker waits for trials of other workers. If the host of a trial has died, the trial appears to
# be running until its lock is stale, so the wait must be longer than that.
_PATIENCE_S = STALE_AFTER_S + 30
_PAUSE_S = (0.1, 10.0)


@dataclass
class Worker:
    """A sweep worker: a callable object that can be pickled and sent to another process.

    Attributes:
        folder: the folder of the sweep.
        ranks: the number of ranks (tasks of a Slurm job) that train each trial together.
        runner: the function that trains a trial; None for ``run_trial``.
    """

    folder: str
    ranks: int = 1
    runner: Callable[..., dict[str, Any]] | None = None

    def __call__(self, number: int = 0) -> str | None:
        """Run trials until none are left, and return the message of an error that the user must fix."""
        # Each worker has a different number, which determines its GPU and its first trial.
        try:
            with self._ranks_of_job() as ranks:
                ended_by = self._work(number, ranks)
        except RankError:  # another rank (process) of this Slurm job failed; the next job resumes the trial
            raise
        except UserError as error:
            return str(error)
        if ended_by == "SIGUSR2":  # Slurm announces a timeout; submitit's handler then requeues the job
            os.kill(os.getpid(), signal.SIGUSR2)
        if ended_by:
            sys.exit(128 + signal.Signals[ended_by])
        return None

    def checkpoint(self, number: int) -> Any:
        """Called by submitit: return the job that runs this worker again after a timeout."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)

    @contextmanager
    def _ranks_of_job(self) -> Iterator[Any]:
        """Connect the tasks of this Slurm job as ranks. Yield None if the job has only one task."""
        if self.ranks == 1:
            yield None
            return
        from submitit.helpers import TorchDistributedEnvironment

        os.environ.pop("MASTER_PORT", None)  # so that submitit derives the port from the job id
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        from adaecho.ranks import distributed_context
        from adaecho.training.device import choose_device

        config = from_plain(read_design(Path(self.folder)).arms[0].config)
        with distributed_context(choose_device(config), config.rank_timeout_s) as ranks:
            yield ranks

    def _work(self, number: int, ranks: Any) -> str | None:
        """Run the remaining trials. Return the name of the signal that ended the work, or None."""
        run = self.runner
        if run is None:
            import torch

            from adaecho.training.trial import run_trial

            run = run_trial
            if ranks is None and torch.cuda.is_available():
                torch.cuda.set_device(number % torch.cuda.device_count())
        gc.freeze()  # so that gc.collect() does not scan the objects of imported modules before each trial
        trials = self._next_trials(number)
        if ranks:
            run = partial(run, ranks=ranks)
        while step := ranks.from_first(lambda: next(trials, None)) if ranks else next(trials, None):
            if isinstance(step, float):
                time.sleep(step)
            elif ended_by := _train(run, *step, reraise=bool(ranks)):
                return ended_by
        return None

    def _next_trials(self, number: int) -> Iterator[float | tuple[Path, dict[str, Any], list[str]]]:
        """Yield the next trial as (folder, config, overrides), or a time in seconds to wait."""
        folder, plain, state = Path(self.folder), None, None
        given_up: set[TrialId] = set()
        idle_since = time.monotonic()
        while True:
            now = read_json(folder / "design.json")
            if state is None or now != plain:  # on the first pass, or after trials were added to the design
                plain, state = now, SweepState(Design.from_dict(now), folder)
            left = [trial for trial in state.missing() if trial not in given_up]
            if not left:
                return
            first = number % len(left)  # workers start at different trials, so that they rarely collide
            for trial in [*left[first:], *left[:first]]:
                if _claim(state, trial, given_up):
                    yield folder / str(trial), *state.design.trial(trial)
                    state.reread(trial)
                    idle_since = time.monotonic()
                    break
            else:
                # Other workers run the remaining trials. Wait for them, because a trial that diverges has to
                # be replaced, and a trial whose worker dies has to be continued.
                idle_s = time.monotonic() - idle_since
                if idle_s > _PATIENCE_S:
                    return
                yield min(max(_PAUSE_S[0], idle_s / 5), _PAUSE_S[1])


def _train(
    run: Callable[..., dict[str, Any]],
    folder: Path,
    config: dict[str, Any],
    overrides: list[str],
    *,
    reraise: bool,
) -> str | None:
    """Train one trial, and return the name of the signal that ended it, or None.

    Args:
        reraise: whether to raise an unexpected error. Otherwise the error is only printed.
    """
    name, log = "/".join(folder.parts[-3:]), folder / ATTEMPTS
    prune = partial(cannot_win, folder) if config["search"]["prune"] else None
    print_line(f"{name}: started")
    gc.collect()  # frees the data of the previous trial, which reference cycles may keep alive
    try:
        summary = run(from_plain(config), folder, overrides, prune=prune, begun=partial(_begin, log))
    except FolderInUseError:
        print_line(f"{name}: another worker has taken it")
        return None
    except RankError:
        raise
    except UserError as error:
        log.unlink(missing_ok=True)
        raise UserError(f"trial {name}: {error}") from error
    except WaitEndedError as error:  # not a failure, because the last checkpoint is valid
        log.unlink(missing_ok=True)
        return error.signal or "SIGTERM"
    except Exception:
        if reraise:
            raise
        traceback.print_exc()
        return None
    log.unlink(missing_ok=True)
    print_line(f"{name}: {summary['status']}")
    preempted = "SIGTERM" if summary["status"] == Status.PREEMPTED else None
    return summary.get("signal") or preempted  # "signal" may be set after the outcome was decided


def _claim(state: SweepState, trial: TrialId, given_up: set[TrialId]) -> bool:
    """Return whether this worker should run a trial. A trial with no attempts left is recorded as failed."""
    run = RunFolder(state.folder / str(trial))
    log = run.path / ATTEMPTS
    try:
        with run.lock():
            if state.reread(trial) in FINISHED:
                return False
            if _attempts(log) < MAX_ATTEMPTS:
                # Another worker may start the trial before the trainer locks the folder again; see _begin.
                return True
            given_up.add(trial)
            if state.status(trial) != Status.FAILED:  # its process was killed and could not record this
                run.start(*state.design.trial(trial), environment())
                summary = run.read_summary() or {"to_target": None, "best": None}
                error = f"its process was killed, often for lack of memory; see the logs in {state.folder}"
                run.write_summary({**summary, "status": Status.FAILED, "error": error})
                state.reread(trial)
    except FolderInUseError:
        pass
    return False


def _begin(log: Path) -> None:
    """Record the start of an attempt to run a trial. The run folder must be locked."""
    # Another worker may have started an attempt since _claim.
    if _attempts(log) >= MAX_ATTEMPTS:
        raise FolderInUseError(f"{log.parent}: another worker has started the last attempt")
    append(log, "begun\n")


def _attempts(log: Path) -> int:
    return len(log.read_bytes().splitlines()) if log.exists() else 0


def main(arguments: list[str] | None = None) -> None:
    """Run the command ``python -m adaecho.search.worker``."""
    parser = argparse.ArgumentParser(prog="python -m adaecho.search.worker", description=__doc__)
    parser.add_argument("folder", help="folder of a sweep that a -m command has started")
    with report_errors():
        if message := Worker(parser.parse_args(arguments).folder)(os.getpid()):
            raise UserError(message)


if __name__ == "__main__":
    main()
