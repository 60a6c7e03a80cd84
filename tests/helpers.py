"""Helpers for tests of several packages."""

import io
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho.training import trainer

CLOCKS = ("_s", "_s_per_batch", "_s_per_step")  # endings of fields that depend on a timer


def summary(folder: Path | str) -> dict[str, Any]:
    """The summary of a run."""
    found: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
    return found


def through_torch_save(state: Any) -> Any:
    """A state after torch.save and a load with ``weights_only``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def metrics(folder: Path | str, *, clocks: bool = False) -> list[dict[str, Any]]:
    """The evaluations of a run, without fields that depend on a timer unless ``clocks``."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if clocks or not key.endswith(CLOCKS)} for line in lines
    ]


def dying(
    function: Callable[..., Any], die_at: int, calls: list[int], number: signal.Signals = signal.SIGKILL
) -> Callable[..., Any]:
    """``function``, but kill the process at call number ``die_at`` of all functions that share ``calls``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == die_at:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return call


def signal_at(patch: pytest.MonkeyPatch, step: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to this process after a step of its runs."""
    taken = trainer.Trainer._step

    def then_signalled(self: trainer.Trainer, batch: Any) -> None:
        taken(self, batch)
        if self.progress.steps == step:
            os.kill(os.getpid(), number)

    patch.setattr(trainer.Trainer, "_step", then_signalled)


@contextmanager
def small_disk(folder: Path, of: str) -> Iterator[Callable[[], None]]:
    """Mount a small file system at ``folder``; yields a function that makes it large."""

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return os.geteuid() == 0 and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

    folder.mkdir()
    if not mount(of):
        pytest.skip("needs root to mount a file system")
    try:
        yield lambda: mount("remount,size=64m") or pytest.fail("cannot be made larger")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
