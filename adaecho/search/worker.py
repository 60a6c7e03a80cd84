"""One worker of a sweep: it takes the next missing trial that no other one is at, until none is left.

::

    python -m adaecho.search.worker SWEEP_FOLDER

The folder is the truth: ``design.json`` says what the trials are, the run folders how far each has come, and
their locks who is at work. So workers need not know of each other. Any number may run, on every host that
shares the folder; one that is killed leaves a trial that another continues.
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

from adaecho.config.launched import importing
from adaecho.config.schema import from_plain
from adaecho.errors import RankError, UserError, fail, print_line, report_errors
from adaecho.records.environment import code_digest, environment
from adaecho.records.files import append, read_json
from adaecho.records.folder import STALE_AFTER_S, FolderInUseError, RunFolder
from adaecho.records.trials import FINISHED, Status
from adaecho.search.design import Design, TrialId, read_design
from adaecho.search.state import Pruner, SweepState
from adaecho.training.signals import WaitEndedError

MAX_ATTEMPTS = 3  # a failed trial is tried again twice
ATTEMPTS = "attempts.log"  # a line for each time that a trial was begun and neither ended nor was interrupted
# A trial whose host died looks alive until its lock is stale; meanwhile there may be nothing else to do.
_PATIENCE_S = STALE_AFTER_S + 30
_PAUSE_S = (0.1, 10.0)


@dataclass
class Worker:
    """A callable that can be pickled; it holds where the work is, and never how far it got.

    Attributes:
        folder: of the sweep.
        num_workers: how many there are: each begins at another trial.
        ranks: how many tasks of its Slurm job train each trial together; all are such a worker, and the first
            one chooses the trials.
        code: digest of the code at submission; empty runs with whatever is there.
        runner: what trains a trial, with the arguments of ``run_trial``; None is that.
    """

    folder: str
    num_workers: int = 1
    ranks: int = 1
    code: str = ""
    runner: Callable[..., dict[str, Any]] | None = None

    def __call__(self, number: int = 0) -> str | None:
        """Work until nothing is missing that can still be run; returns what only the user can mend.

        Args:
            number: of this worker, from 0.

        Raises:
            RankError: another rank failed; it counts as an attempt, and the next job goes on.
        """
        if self.code and self.code != code_digest():
            return "the code has changed since this job was submitted; the same -m command goes on with it"
        try:
            with self._ranks_of_job(number) as ranks:
                ended_by = self._work(number, ranks)
        except RankError:
            raise
        except UserError as error:
            return str(error)
        if ended_by == "SIGUSR2":  # a time-out: submitit's own handler asks for the requeue
            os.kill(os.getpid(), signal.SIGUSR2)
        if ended_by:
            sys.exit(128 + signal.Signals[ended_by])
        return None

    def checkpoint(self, number: int) -> Any:
        """What submitit submits again at a time-out or preemption: the same worker."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)

    @contextmanager
    def _ranks_of_job(self, number: int) -> Iterator[Any]:
        """The tasks of this Slurm job, joined inside the block; None where the worker is one process."""
        if self.ranks == 1:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_available():
                torch.cuda.set_device(number % torch.cuda.device_count())
            yield None
            return
        from submitit.helpers import TorchDistributedEnvironment

        os.environ.pop("MASTER_PORT", None)  # submitit's follows from the job's number
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        from adaecho.ranks import distributed_context
        from adaecho.training.device import choose_device

        config = from_plain(read_design(Path(self.folder)).arms[0].config)
        with distributed_context(choose_device(config), config.rank_timeout_s) as ranks:
            yield ranks

    def _work(self, number: int, ranks: Any) -> str | None:
        """Do what the first rank chooses; the signal that ended it, if one did."""
        with importing():
            run = self.runner or _run_trial()
        orders = self._orders(number)
        if ranks:
            run = partial(run, ranks=ranks)
        while order := ranks.from_first(lambda: next(orders, None)) if ranks else next(orders, None):
            if isinstance(order, float):
                time.sleep(order)
            elif ended_by := _train(run, *order, last=bool(ranks)):
                return ended_by
        return None

    def _orders(self, number: int) -> Iterator[float | tuple[Path, dict[str, Any], list[str]]]:
        """A trial to train (folder, config, overrides), or seconds to wait for those of other workers."""
        folder, plain, state = Path(self.folder), None, None
        given_up: set[TrialId] = set()
        idle_since = time.monotonic()
        while True:
            now = read_json(folder / "design.json")
            if state is None or now != plain:  # it may have grown, or be another one
                plain, state = now, SweepState(Design.from_dict(now), folder)
            left = [trial for trial in state.missing() if trial not in given_up]
            if not left:
                return
            for trial in [*left[number % len(left) :: self.num_workers], *left]:
                if _claim(state, trial, given_up):
                    yield state.trial_folder(trial), *state.design.trial(trial)
                    state.reread(trial)
                    idle_since = time.monotonic()
                    break
            else:
                # All that is left is in other hands. It may yet diverge and call for more, or be abandoned.
                idle_s = time.monotonic() - idle_since
                if idle_s > _PATIENCE_S:
                    return
                longest = max(_PAUSE_S[0], self.num_workers / 4)  # hundreds don't crowd a network file system
                yield min(max(_PAUSE_S[0], idle_s / 5), longest, _PAUSE_S[1])


def _train(
    run: Callable[..., dict[str, Any]],
    folder: Path,
    config: dict[str, Any],
    overrides: list[str],
    *,
    last: bool,
) -> str | None:
    """Train a trial; the signal that ended it, if one did. ``last``: after an error there is no next one."""
    name, log = "/".join(folder.parts[-3:]), folder / ATTEMPTS
    prune = Pruner(folder) if config["search"]["prune"] else None
    print_line(f"{name}: begun")
    gc.collect()  # a trial's objects refer to one another and to its data: a dozen would pile up
    try:
        summary = run(from_plain(config), folder, overrides, prune=prune, begun=partial(_begin, log))
    except FolderInUseError:
        print_line(f"{name}: another worker was faster")
        return None
    except RankError:
        raise
    except UserError as error:
        log.unlink(missing_ok=True)
        raise UserError(f"trial {name}: {error}") from error
    except WaitEndedError as error:  # its last checkpoint holds: the rest is no failure of the trial's
        log.unlink(missing_ok=True)
        return error.signal or "SIGTERM"
    except Exception:
        if last:
            raise
        traceback.print_exc()
        return None
    log.unlink(missing_ok=True)
    print_line(f"{name}: {summary['status']}")
    preempted = "SIGTERM" if summary["status"] == Status.PREEMPTED else None
    return summary.get("signal") or preempted  # a signal may come when the outcome is decided


def _claim(state: SweepState, trial: TrialId, given_up: set[TrialId]) -> bool:
    """Whether nobody is at a trial and another attempt is worth while.

    The trainer takes the lock again: another worker may be faster.
    """
    run = RunFolder(state.trial_folder(trial))
    log = run.path / ATTEMPTS
    try:
        with run.lock():
            if state.reread(trial) in FINISHED:
                return False
            if _attempts(log) < MAX_ATTEMPTS:
                return True
            given_up.add(trial)
            if state.status(trial) != Status.FAILED:  # its process died without a word
                run.start(*state.design.trial(trial), environment())
                summary = run.read_summary() or {"to_target": None, "best": None}
                error = f"its process died, often for want of memory; see the logs in {state.folder}"
                run.write_summary({**summary, "status": Status.FAILED, "error": error})
                state.reread(trial)
    except FolderInUseError:
        pass
    return False


def _begin(log: Path) -> None:
    """Count an attempt, once the folder is this process's alone: others may have seen the same trial free."""
    if _attempts(log) >= MAX_ATTEMPTS:
        raise FolderInUseError(f"{log.parent}: another worker has begun the last attempt")
    append(log, "begun\n")


def _attempts(log: Path) -> int:
    return len(log.read_bytes().splitlines()) if log.exists() else 0


def _run_trial() -> Callable[..., dict[str, Any]]:
    from adaecho.training.trial import run_trial

    return run_trial


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m adaecho.search.worker", description=__doc__)
    parser.add_argument("folder", help="of the sweep, which a -m command has begun")
    with report_errors():
        message = Worker(parser.parse_args(arguments).folder, num_workers=64)(os.getpid())
    if message is not None:
        fail(message)


if __name__ == "__main__":
    main()
