"""Processes that a test may kill, forked from a server that has imported their modules.

A process has a single server, so all tests share one list of modules.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from adaecho.search import launch

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])


class Done(NamedTuple):
    """Exit code and output of a command."""

    code: int | None
    out: str
    err: str


def typed(
    module: str, *arguments: str, folder: Path | str = ".", forks_workers: bool = False, **variables: str
) -> Done:
    """Run ``python -m module arguments`` in a folder, with environment variables, in a forked process.

    Args:
        forks_workers: fork the workers of a sweep, so that they share this process's patches.
    """
    environment = {**os.environ, **variables}
    with tempfile.TemporaryDirectory() as said:
        given = (module, arguments, str(Path(folder).absolute()), environment, said, forks_workers)
        process = FORKS.Process(target=_typed, args=given)
        process.start()
        process.join()
        return Done(process.exitcode, *(Path(said, name).read_text() for name in ("out", "err")))


def _typed(
    module: str,
    arguments: tuple[str, ...],
    folder: str,
    environment: dict[str, str],
    said: str,
    forks_workers: bool,
) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    if forks_workers:
        launch.CONTEXT = multiprocessing.get_context("fork")
    _run(module, arguments, environment)


def _run(module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, os.getcwd())  # as python -m does
    sys.modules.pop(module, None)  # runpy warns about an imported module
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
