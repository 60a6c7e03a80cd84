"""Processes that a test may kill, forked from a server that has imported once what they need.

One server serves all tests of a process, and one list of modules: whichever was set last would hold for all.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "adaecho.training.trial", "adaecho.tasks.digits",
    "torch._dynamo",  # DistributedDataParallel imports it, which takes seconds
    "adaecho.tasks.imagenet", "pyarrow.parquet", "tokenizers",
])  # fmt: skip


class Done(NamedTuple):
    """How a command ended, and what it said."""

    code: int | None
    out: str
    err: str


def typed(module: str, *arguments: str, folder: Path | str = ".", **variables: str) -> Done:
    """``python -m module arguments`` in a folder, with those variables; no interpreter is started."""
    environment = {**os.environ, **variables}
    with tempfile.TemporaryDirectory() as said:
        given = (module, arguments, str(Path(folder).absolute()), environment, said)
        process = FORKS.Process(target=_typed, args=given)
        process.start()
        process.join()
        return Done(process.exitcode, *(Path(said, name).read_text() for name in ("out", "err")))


def _typed(
    module: str, arguments: tuple[str, ...], folder: str, environment: dict[str, str], said: str
) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)  # as -m does
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
