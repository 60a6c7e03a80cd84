"""The command under torchrun: a restart after a kill continues the run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import paced
from tests.conftest import Compose
from tests.helpers import metrics, summary
from tests.training.several_ranks import needs_gloo, run_on

pytestmark = [
    needs_gloo,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc, which Linux alone has"),
]

RUN = (
    "task=digits_mlp", "tracking=none", "precision=float32", "device=cpu", "target.value=null",
    "evaluate.every_fresh_examples=512", "max_steps=240", "checkpoint_every_s=0.2",
    "echo=batch", "echo.factor=2",
)  # fmt: skip
PACED = f"task.name={paced.NAME}"  # waits at each step until the gate is open
END_S = 240


def torchrun(folder: str, *more: str, options: tuple[str, ...] = (), gate: str = "") -> subprocess.Popen[str]:
    """Start two ranks on this machine; the gate file ends their pacing."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    return subprocess.Popen(
        [*start, "-m", "adaecho.run", *RUN, f"hydra.run.dir={folder}", *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **({paced.GATE: str(Path(gate).absolute())} if gate else {})},
    )  # fmt: skip


def ranks_of(launcher: int) -> list[int]:
    """The child processes of the launcher, in order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def wait(until: Callable[[], object]) -> None:
    end = time.monotonic() + END_S
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)


def paced_run(*options: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a paced run and wait for its checkpoint; returns the launcher and its ranks."""
    launcher = torchrun("run", PACED, options=options, gate="gate")

    def has_a_checkpoint() -> bool:
        assert launcher.poll() is None, launcher.communicate()
        return Path("run/checkpoint/last.pt").exists()

    wait(has_a_checkpoint)
    return launcher, ranks_of(launcher.pid)


_whole: list[list[dict[str, Any]]] = []


@pytest.fixture
def whole(compose_config: Compose, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of the same run undisturbed, trained once."""
    if not _whole:
        folder = tmp_path_factory.mktemp("whole") / "run"
        assert run_on(2, compose_config(*RUN), folder) == [(0, "budget_spent")] * 2
        assert summary(folder)["ranks"] == 2
        _whole.append(metrics(folder))
    return _whole[0]


@pytest.mark.other_forms  # half a minute; test_ranks.py restarts a run with torchrun's variables
def test_a_restart_after_a_kill_continues_the_run(whole: list[dict[str, Any]]) -> None:
    launcher, ranks = paced_run("--max-restarts", "2")
    os.kill(ranks[-1], signal.SIGKILL)
    Path("gate").touch()
    out, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 0, errors
    assert "budget_spent:" in out
    assert metrics("run") == whole
