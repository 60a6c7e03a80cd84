"""Callbacks see each evaluation and the end, and change nothing; the page that shows one, as it stands."""

import json
import random
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from adaecho.config import tasks
from adaecho.config.identity import run_id
from adaecho.config.schema import from_plain, to_plain
from adaecho.errors import UserError
from adaecho.records.folder import RunFolder
from adaecho.training.callbacks import Callbacks
from adaecho.training.trial import run_trial
from tests.conftest import Compose, HandClock
from tests.forks import typed
from tests.helpers import metrics
from tests.programs import blocks, commands, write
from tests.training.several_ranks import run_on

BLOCKS = blocks("Callbacks")
FOLDER = Path("run")
RUN = (
    "max_fresh_examples=640", "evaluate.every_fresh_examples=160", "target.value=null",
    "echo.shuffle_buffer=64",
)  # fmt: skip
Told = list[tuple[Any, ...]]


class Seen:
    """Writes down what it is told, and spoils all that it is given."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def on_evaluation(self, metrics: dict[str, Any], fresh_examples: int, steps: int) -> None:
        self.told.append((dict(metrics), fresh_examples, steps))
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    def on_end(self, summary: dict[str, Any]) -> None:
        self.told.append((dict(summary),))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What the callback ``seen`` has been told."""
    heard: Told = []
    install(monkeypatch, "seen", lambda _config, _folder: Seen(heard))
    return heard


def install(monkeypatch: pytest.MonkeyPatch, name: str, build: Callable[..., Any] | None) -> None:
    """A module that can be imported by that name."""
    from importlib.machinery import ModuleSpec

    module: Any = ModuleType(name)
    module.__spec__, module.__file__ = ModuleSpec(name, None), f"{name}.py"
    if build is not None:
        module.build = build
    monkeypatch.setitem(sys.modules, name, module)


def test_they_see_each_evaluation_and_the_end_and_change_nothing(compose_config: Compose, told: Told) -> None:
    config, without, folder = compose_config(*RUN, "callbacks=[seen]"), compose_config(*RUN), Path("without")
    summary = run_trial(config, FOLDER)
    lines = metrics(FOLDER, clocks=True)
    assert len(lines) == 4
    assert [({**seen, "fresh_examples": fresh, "steps": steps}) for seen, fresh, steps in told[:-1]] == lines
    assert told[-1] == (summary,)
    assert run_trial(config, FOLDER) == summary
    assert len(told) == 5, "a finished run tells nothing"
    run_trial(without, folder)
    assert metrics(FOLDER) == metrics(folder)
    assert run_id(to_plain(config)) == run_id(to_plain(without))
    line = {"accuracy": 0.5, "fresh_examples": 8, "steps": 1}
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    Callbacks(config, FOLDER, torch.device("cpu")).on_evaluation(line)
    drawn = float(torch.rand(())), np.random.rand(), random.random()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    assert drawn == (float(torch.rand(())), np.random.rand(), random.random())


def test_what_they_take_is_on_no_clock(
    compose_config: Compose, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def on_evaluation(self, *_: Any) -> None:
            clock.now += 1000

    install(monkeypatch, "slow", lambda *_: Slow())
    summary = run_trial(compose_config(*RUN, "callbacks=[slow]"), FOLDER)
    assert clock.now == 4100
    assert summary["train_time_s"] == summary["eval_time_s"] == 0


def test_an_interrupted_run_tells_each_evaluation_once(compose_config: Compose, told: Told) -> None:
    run_trial(compose_config(*RUN, "max_fresh_examples=330", "callbacks=[seen]"), FOLDER)
    run_trial(compose_config(*RUN, "callbacks=[seen]"), FOLDER)
    assert [line[1] for line in told if len(line) == 3] == [160, 320, 480, 640]


@pytest.mark.parametrize("hook", ["on_evaluation", "on_end"])
def test_an_error_ends_the_run_with_its_name_and_the_same_command_continues(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("no such key")

    run_trial(compose_config(*RUN), Path("whole"))
    install(monkeypatch, "wrong", lambda *_: type("W", (), {hook: fails})())
    config = compose_config(*RUN, "callbacks=[wrong]")
    with pytest.raises(UserError, match=rf"callbacks: {hook} of wrong raised KeyError: 'no such key'\. Its"):
        run_trial(config, FOLDER)
    assert (RunFolder(FOLDER).read_summary() or {})["status"] == "failed"
    assert 'raise KeyError("no such key")' in (FOLDER / "traceback.txt").read_text()
    heard: Told = []
    install(monkeypatch, "wrong", lambda *_: Seen(heard))
    assert run_trial(config, FOLDER)["status"] == "budget_spent"
    assert metrics(FOLDER) == metrics("whole")
    assert len(heard[-1]) == 1, "the end is told after all"


NO_CALLBACK = {
    "no build": (None, "callbacks: build of odd raised AttributeError"),
    "no method": (lambda *_: [], r"callbacks=\[odd\]: its build returned none of on_evaluation and on_end"),
    "no arguments": (lambda: 1, r"callbacks: build of odd raised TypeError: .* takes 0 positional"),
}


@pytest.mark.parametrize(("build", "message"), NO_CALLBACK.values(), ids=NO_CALLBACK)
def test_what_is_no_callback_is_refused_before_training(
    build: Any, message: str, compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "odd", build)
    with pytest.raises(UserError, match=message):
        run_trial(compose_config(*RUN, "callbacks=[odd]"), FOLDER)
    assert not (FOLDER / "metrics.jsonl").exists()


def test_an_installed_entry_point_is_named_by_its_name(
    compose_config: Compose, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    def entry_points(*, group: str, name: str) -> list[EntryPoint]:
        return [EntryPoint(name, "seen", group)] if (group, name) == ("adaecho.callbacks", "short") else []

    monkeypatch.setattr(tasks.metadata, "entry_points", entry_points)
    run_trial(from_plain({**to_plain(compose_config(*RUN)), "callbacks": ["short"]}), FOLDER)
    assert len(told) == 5


def _writing(rank: int) -> None:
    """In a rank's process: a callback ``seen`` that writes beside the run's folder what this rank is told."""

    class Writes:
        def __init__(self, folder: Path) -> None:
            self.file = folder.parent / f"told.{rank}"
            self.file.touch()

        def on_evaluation(self, *told: Any) -> None:
            with self.file.open("a") as file:
                file.write(f"{told}\n")

    install(pytest.MonkeyPatch(), "seen", lambda _, folder: Writes(folder))


def test_the_first_of_several_ranks_alone_has_them(compose_config: Compose, told: Told) -> None:
    ended = run_on(2, compose_config(*RUN, "callbacks=[seen]"), FOLDER, before=_writing)
    assert ended == [(0, "budget_spent")] * 2
    assert len(Path("told.0").read_text().splitlines()) == len(metrics(FOLDER)) > 0
    assert not Path("told.1").exists()
    assert not told


@pytest.mark.parametrize("line", commands(BLOCKS))
def test_every_command_of_the_page_runs(tmp_path: Path, line: str) -> None:
    write(BLOCKS, tmp_path)
    python, *arguments = shlex.split(line)
    assert (python, arguments[0]) == ("python", "-m")
    done = typed(*arguments[1:], *RUN, "tracking=none", folder=tmp_path, forks_workers=True)
    assert done.code == 0, done.out + done.err
    said = (tmp_path / "progress.txt").read_text().splitlines()
    summaries = [json.loads(path.read_text()) for path in tmp_path.rglob("*/summary.json")]
    runs = [one for one in summaries if "echo" in one]
    assert len(runs) == (2 if " -m task" in line else 1)
    assert len(said) == 5 * len(runs)
    for run in runs:
        name = f"{run['echo']['variant']}, seed {run['seed']}"
        assert f"{name}: budget_spent, best {run['best']['value']:.3f}" in said
        assert sum(text.startswith(f"{name}: accuracy ") for text in said) == 4
