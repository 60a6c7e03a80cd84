"""What a run shows: a bar with the time left on a terminal, a line now and then elsewhere."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from adaecho.config.schema import Config
from adaecho.training import display as display_module
from adaecho.training.display import Display
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics

RUN = ("task=digits_mlp", "max_steps=40", "target.value=null")


@pytest.fixture
def config(compose_config: Compose) -> Config:
    return compose_config(*RUN)


def _shown(config: Config, *, terminal: bool = False) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, color_system=None, soft_wrap=True)
    run_trial(config, Path("run"), display=Display(config, console))
    return file.getvalue().splitlines()


def _trainer(loader: Any) -> Any:
    """What a display reads, before the first step."""
    return SimpleNamespace(
        progress=SimpleNamespace(steps=0), fresh_examples=0, clocks=SimpleNamespace(train_time_s=0.0),
        loader=loader,
    )  # fmt: skip


def test_a_short_run_prints_no_lines_of_its_own(compose_config: Compose, config: Config) -> None:
    with pytest.MonkeyPatch.context() as patch:  # short by this clock, on a machine however slow
        patch.setattr(display_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
        assert _shown(config) == []
        # Its budget grown, it says from where it goes on; with fresh=true, where the old run is.
        assert _shown(compose_config(*RUN, "max_steps=50")) == ["continuing at step 40"]
        assert _shown(compose_config(*RUN, "fresh=true")) == ["old run kept in run.old-1"]


def test_lines_come_ever_more_rarely(compose_config: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_module, "_FIRST_LINE_S", 0.05)
    lines = _shown(compose_config(*RUN, "checkpoint_every_s=1000000", "max_steps=null", "max_train_time_s=2"))
    assert 3 <= len(lines) <= 6  # after 0.05, 0.15, 0.35, 0.75 and 1.55 seconds
    assert all("left" in line and "fresh" in line for line in lines[1:])
    assert "accuracy" in lines[-1]


def test_what_takes_long_before_the_first_step_is_told(config: Config) -> None:
    file = io.StringIO()
    loader = SimpleNamespace(settings=SimpleNamespace(to_fill={"shuffle_buffer": 20_000.0}))
    with Display(config, Console(file=file)).showing(_trainer(loader)):
        pass
    assert file.getvalue() == "reading about 20,000 fresh examples before the first step\n"


def test_the_time_left_is_of_the_steps_without_what_came_before_them(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = Display(compose_config("task=digits_mlp", "max_steps=100", "max_fresh_examples=null"))
    trainer = _trainer(SimpleNamespace(settings=SimpleNamespace(to_fill={})))

    def state(steps: int, now: float) -> str:
        trainer.progress.steps = steps
        monkeypatch.setattr(display_module, "time", SimpleNamespace(monotonic=lambda: now))
        display.step(trainer)
        return display._state(trainer, now, steps / 100)

    # 100 s of compiling, then a step a second.
    assert "left" not in state(0, 100.0)
    assert "left" not in state(1, 101.0)
    assert state(11, 111.0).endswith("1:51, <= 1:29 left")


def test_a_display_changes_no_record(config: Config) -> None:
    _shown(config, terminal=True)
    run_trial(config, Path("silent"))
    assert metrics("run") == metrics("silent")


def test_a_terminal_of_80_columns_gets_a_bar_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as typed, on a pseudo-terminal."""
    command = [sys.executable, "-m", "adaecho.run", "tracking=none", "hydra.run.dir=run", *RUN]
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    seen = b""
    try:
        while block := os.read(ours, 65536):
            seen += block
    except OSError:  # the other end is closed
        pass
    assert process.wait() == 0, seen
    os.close(ours)
    text = seen.decode()
    assert "━" in text
    bars = [part for part in text.replace("\r", "\n").split("\n") if "━" in part and "step" in part]
    assert bars
    assert all(len(re.sub(r"\x1b[^a-zA-Z]*[a-zA-Z]", "", bar)) <= 80 for bar in bars)
    assert "budget_spent" in text.splitlines()[-1]
