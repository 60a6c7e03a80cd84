"""One piece of a run in a forked process, with a fault at its n-th disk operation or step."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaecho.config.schema import from_plain
from adaecho.errors import UserError
from tests.forks import FORKS

DONE, CRASHED, REFUSED = 0, 1, 3


def _fill() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAULTS: dict[str, Callable[[], None]] = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "full": _fill}


def run_piece(plain: dict[str, Any], folder: str, fault: str | None, at: int) -> None:
    """Run or continue the run in ``folder``; exits with ``DONE``, ``CRASHED`` or ``REFUSED``."""
    from adaecho.training import trainer, trial

    calls = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if fault is not None and (calls[0] == at or (fault == "full" and calls[0] > at)):
                FAULTS[fault]()
            return function(*args, **kwargs)

        return call

    names = ["write", "fsync", "pwrite", "ftruncate"]
    if fault != "full":  # a full disk still renames
        names += ["truncate", "replace", "unlink"]
        trainer.Trainer._step = counted(trainer.Trainer._step)  # type: ignore[method-assign]
        Path.replace = counted(Path.replace)  # type: ignore[method-assign]
    for name in names:
        setattr(os, name, counted(getattr(os, name)))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # warnings, and the tracebacks of expected failures
    try:
        trial.run_trial(from_plain(plain), Path(folder))
    except UserError:
        os._exit(REFUSED)
    except BaseException:
        os._exit(CRASHED)
    os._exit(DONE)


def start(plain: dict[str, Any], folder: Path, fault: str | None = None, at: int = 0) -> Any:
    """Start the process of a piece."""
    process = FORKS.Process(target=run_piece, args=(plain, str(folder), fault, at))
    process.start()
    return process


def finish(plain: dict[str, Any], folder: Path, fault: str | None = None, at: int = 0) -> int:
    """Run a piece; returns its exit code, negative for a signal."""
    process = start(plain, folder, fault, at)
    process.join()
    code: int = process.exitcode
    process.close()
    return code
