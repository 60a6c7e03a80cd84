"""The command: its output, its exit codes, and its messages for ordinary mistakes."""

import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.helpers import signal_at

QUICK = ("tracking=none", "max_steps=3", "hydra.run.dir=run")


@pytest.fixture
def command(command: Command) -> Command:
    """The command ``adaecho.run``."""
    return functools.partial(command, "adaecho.run")


def test_a_run_prints_its_folder_and_its_outcome(command: Command) -> None:
    code, out, _ = command(*QUICK)
    first, *_, weights, last = out.splitlines()
    assert code == 0
    assert first.endswith("run: digits, echo=none factor=1, to accuracy 0.97")
    assert weights.endswith("run/model/best.safetensors")
    assert "budget_spent: " in last
    assert "3 steps" in last
    assert command(*QUICK)[1].splitlines()[-1] == last, "the same command on a finished run"


def test_the_folder_is_named_by_what_can_change_the_trajectory(command: Command) -> None:
    same = ("max_steps=2", "tracking=none")
    for overrides in ((), ("data.num_workers=1", "max_train_time_s=100", "data.prefetch=4")):
        assert command(*same, *overrides)[0] == 0
    assert len(list(Path("runs/digits").iterdir())) == 1
    assert command(*same, "seed=1")[0] == 0
    assert len(list(Path("runs/digits").iterdir())) == 2


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (("echo.facto=2",), ("echo.facto", "Did you mean echo.factor")),
        (("data.path=B\u00fccher",), ("data.path=B\u00fccher",)),
        (("task=digit",), ("task/digit", "digits")),
        (("seed=abc",), ("seed", "abc", "Integer")),
        (("echo.factor=0.5", "echo=batch"), ("echo.factor=0.5", "at least 1")),
        (("echo.factor=2",), ("echo.factor=2", "echo=none")),
        (("target.metric=map",), ("target.metric", "map", "accuracy")),
        (("schedule.shape=linear_decay",), ("schedule.decay_steps", "linear_decay")),
        (("max_steps=0",), ("max_steps=0", "greater than 0")),
        (("+max_setps=5",), ("max_setps", "unknown key")),
        (("~task",), ("task.name",)),
        (("~echo.factor",), ("does not support deletion",)),
        (("hydra.run.dir=/proc/adaecho/run",), ("/proc/adaecho",)),
        (("echo.batch_shuffle_buffer=3",), ("echo.batch_shuffle_buffer=3", "echo=batch")),
        (("data.path=somewhere",), ("data.path=somewhere", "digits")),
        (
            (f"echo.shuffle_buffer={10**12}",),
            ("shuffle_buffer: needs", "reduce shuffle_buffer"),
        ),
        (
            ("max_fresh_examples=100",),
            ("max_fresh_examples=100", "echo.shuffle_buffer=256", "raise max_fresh_examples"),
        ),
        (("task=cifar10", "data.path=/absent/folder"), ("/absent/folder",)),
        (("task=small_text", "scale=text", "data.path=/absent/folder"), ("/absent/folder",)),
        (("batch_size=???",), ("batch_size",)),
        (("target.value=97",), ("target.value=97", "fraction", "0.97")),
        (("callbacks=my_module",), ("callbacks",)),
        (("experiment=quickstart",), ("search.arms", "needs -m")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_an_ordinary_mistake_gets_one_message_and_starts_nothing(
    command: Command, overrides: tuple[str, ...], needed: tuple[str, ...]
) -> None:
    code, out, err = command("tracking=none", "max_steps=1", "hydra.run.dir=run", *overrides)
    assert code == 2
    assert "Traceback" not in out + err
    assert err.startswith("error: ")
    for text in needed:
        assert text in err
    assert not (Path("run") / "metrics.jsonl").exists()


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_writer_per_folder_and_ctrl_c_leaves_a_run_that_continues(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = (
        "target.value=null", "max_fresh_examples=null", "data.num_workers=0", "tracking=none",
        "hydra.run.dir=run",
    )  # fmt: skip
    typed = [sys.executable, "-m", "adaecho.run", *endless]
    process = subprocess.Popen(typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for(Path("run/metrics.jsonl"), process)
        code, _, err = command(*endless)
        assert code == 2
        assert str(process.pid) in err, "the message names the process that holds the folder"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "preempted" in out
    assert "ending after this step" in err
    assert "the same command (without restart=true) continues" in err
    stopped = json.loads(Path("run/summary.json").read_text())
    assert stopped["status"] == "preempted"
    signal_at(monkeypatch, stopped["steps"] + 5, signal.SIGINT)
    assert command(*endless)[0] == 130
    assert json.loads(Path("run/summary.json").read_text())["steps"] == stopped["steps"] + 5


def test_a_crash_is_raised_and_recorded(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from adaecho.training import trainer

    def crash(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_step", crash)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            command(*QUICK)
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"
    assert "a bug" in Path("run/traceback.txt").read_text()
    assert command(*QUICK)[0] == 0, "it can be run again"


@pytest.mark.parametrize("argument", ["console", "-m"])
def test_a_task_in_the_current_folder_is_found_by_both_commands(tmp_path: Path, argument: str) -> None:
    # Its options are asked for before torch is imported, which takes longer than all else.
    (tmp_path / "mine.py").write_text("from adaecho.errors import DataError\nraise DataError('found')\n")
    # An entry point is a script of another folder, which Python puts first where -m puts the current one.
    script = tmp_path / "bin" / "adaecho"
    script.parent.mkdir()
    script.write_text("from adaecho.run import cli\ncli()\n")
    begins = [str(script)] if argument == "console" else ["-m", "adaecho.run"]
    typed = [sys.executable, *begins, "task.name=mine"]
    done = subprocess.run(typed, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "error: found", done.stderr
