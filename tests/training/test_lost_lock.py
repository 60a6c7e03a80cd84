"""A run that slept past its heartbeat and lost its folder to another writes nothing there any more."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from adaecho.config.schema import from_plain, to_plain
from adaecho.errors import FolderError
from adaecho.records import lock
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.forks import FORKS
from tests.helpers import dying, metrics
from tests.needs import needs

FOLDER = Path("run")
RUN = ("target.value=null", "evaluate.every_fresh_examples=64", "checkpoint_every_s=0")


def _sleeper(plain: dict[str, Any], sleep_at: int) -> None:
    """A run that falls asleep right before a write to disk; exits with 3 if it is refused when it wakes."""
    from adaecho.records import files

    calls = [0]
    for module, name in ((os, "write"), (os, "fsync"), (os, "truncate"), (files.Path, "replace")):
        setattr(module, name, dying(getattr(module, name), sleep_at, calls, signal.SIGSTOP))
    try:
        run_trial(from_plain(plain), FOLDER)
    except FolderError:
        os._exit(3)
    os._exit(0)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _records() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(FOLDER.rglob("*")) if path.is_file()}


@needs("/proc", present=Path("/proc/self/stat").exists(), remedy="nothing else tells that a process sleeps")
@pytest.mark.parametrize("sleep_at", [9, 41, 43, 45, 47, 49])
def test_a_woken_run_leaves_its_successor_alone(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, sleep_at: int
) -> None:
    sleeper = FORKS.Process(target=_sleeper, args=(to_plain(compose_config(*RUN)), sleep_at))
    sleeper.start()
    assert sleeper.pid is not None
    try:
        while _state(sleeper.pid) != "T":
            assert sleeper.is_alive(), "it ended before it fell asleep"
            time.sleep(0.01)
        with monkeypatch.context() as elsewhere:  # another host, where that process can't be looked up
            elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
            elsewhere.setattr(lock, "STALE_AFTER_S", 0.0)
            other = (*RUN, "optimizer.learning_rate=0.001")
            run_trial(compose_config(*other, "max_steps=6", "fresh=true"), FOLDER)
        before = _records()
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)
    sleeper.join()
    assert sleeper.exitcode == 3
    after = _records()
    # Caught while it made room for its checkpoint, it may have renamed one of the new run's, but no more.
    assert {name: data for name, data in after.items() if "/checkpoint/" not in name} == {
        name: data for name, data in before.items() if "/checkpoint/" not in name
    }
    assert set(after.values()) <= set(before.values()), "nothing of the woken run's is there"
    run_trial(compose_config(*other, "max_steps=12"), FOLDER)
    run_trial(compose_config(*other, "max_steps=12"), Path("undisturbed"))
    assert metrics(FOLDER) == metrics(Path("undisturbed"))
