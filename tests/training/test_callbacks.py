"""Callbacks receive each evaluation and the end of a run; the example of the docs runs."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adaecho.config import tasks
from adaecho.config.identity import run_id
from adaecho.config.schema import from_plain, to_plain
from adaecho.errors import ConfigError
from adaecho.records.folder import RunFolder
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
Calls = list[tuple[Any, ...]]


class Recorder:
    """Records its calls."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def on_evaluation(self, metrics: dict[str, Any], fresh_examples: int, steps: int) -> None:
        self.calls.append((dict(metrics), fresh_examples, steps))

    def on_end(self, summary: dict[str, Any]) -> None:
        self.calls.append((dict(summary),))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of the callback ``recorder``."""
    made: Calls = []
    install(monkeypatch, "recorder", lambda _config, _folder: Recorder(made))
    return made


def install(monkeypatch: pytest.MonkeyPatch, name: str, build: Callable[..., Any] | None) -> None:
    """Make a module importable by this name."""
    from importlib.machinery import ModuleSpec

    module: Any = ModuleType(name)
    module.__spec__, module.__file__ = ModuleSpec(name, None), f"{name}.py"
    if build is not None:
        module.build = build
    monkeypatch.setitem(sys.modules, name, module)


def test_callbacks_receive_each_evaluation_and_the_end(compose_config: Compose, calls: Calls) -> None:
    config, without, folder = (
        compose_config(*RUN, "callbacks=[recorder]"),
        compose_config(*RUN),
        Path("without"),
    )
    summary = run_trial(config, FOLDER)
    lines = metrics(FOLDER, clocks=True)
    assert len(lines) == 4
    assert [({**seen, "fresh_examples": fresh, "steps": steps}) for seen, fresh, steps in calls[:-1]] == lines
    assert calls[-1] == (summary,)
    assert run_trial(config, FOLDER) == summary
    assert len(calls) == 5, "a finished run calls no callback"
    run_trial(without, folder)
    assert metrics(FOLDER) == metrics(folder)
    assert run_id(to_plain(config)) == run_id(to_plain(without))


def test_no_timer_counts_callbacks(
    compose_config: Compose, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def on_evaluation(self, *_: Any) -> None:
            clock.now += 1000

    install(monkeypatch, "slow", lambda *_: Slow())
    summary = run_trial(compose_config(*RUN, "callbacks=[slow]"), FOLDER)
    assert clock.now == 4100
    assert summary["train_time_s"] == summary["eval_time_s"] == 0


def test_a_continued_run_reports_each_evaluation_once(compose_config: Compose, calls: Calls) -> None:
    run_trial(compose_config(*RUN, "max_fresh_examples=330", "callbacks=[recorder]"), FOLDER)
    run_trial(compose_config(*RUN, "callbacks=[recorder]"), FOLDER)
    assert [call[1] for call in calls if len(call) == 3] == [160, 320, 480, 640]


@pytest.mark.parametrize("hook", ["on_evaluation", "on_end"])
def test_after_an_error_of_a_callback_the_same_command_continues(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("no such key")

    run_trial(compose_config(*RUN), Path("whole"))
    install(monkeypatch, "wrong", lambda *_: type("W", (), {hook: fails})())
    config = compose_config(*RUN, "callbacks=[wrong]")
    with pytest.raises(KeyError, match="no such key"):
        run_trial(config, FOLDER)
    assert (RunFolder(FOLDER).read_summary() or {})["status"] == "failed"
    assert 'raise KeyError("no such key")' in (FOLDER / "traceback.txt").read_text()
    made: Calls = []
    install(monkeypatch, "wrong", lambda *_: Recorder(made))
    assert run_trial(config, FOLDER)["status"] == "budget_spent"
    assert metrics(FOLDER) == metrics("whole")
    assert len(made[-1]) == 1, "the retry reports the end"


def test_an_object_without_hooks_is_refused_before_training(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "odd", lambda *_: [])
    with pytest.raises(ConfigError, match=r"callbacks=\[odd\]: build must return .* on_evaluation or on_end"):
        run_trial(compose_config(*RUN, "callbacks=[odd]"), FOLDER)
    assert not (FOLDER / "metrics.jsonl").exists()


def test_an_entry_point_gives_a_callback_a_short_name(
    compose_config: Compose, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    def entry_points(*, group: str, name: str) -> list[EntryPoint]:
        return (
            [EntryPoint(name, "recorder", group)] if (group, name) == ("adaecho.callbacks", "short") else []
        )

    monkeypatch.setattr(tasks.metadata, "entry_points", entry_points)
    run_trial(from_plain({**to_plain(compose_config(*RUN)), "callbacks": ["short"]}), FOLDER)
    assert len(calls) == 5


def _writing(rank: int) -> None:
    """Install a callback that writes the calls of this rank to a file next to the run's folder."""

    class Writes:
        def __init__(self, folder: Path) -> None:
            self.file = folder.parent / f"calls.{rank}"
            self.file.touch()

        def on_evaluation(self, *call: Any) -> None:
            with self.file.open("a") as file:
                file.write(f"{call}\n")

    install(pytest.MonkeyPatch(), "recorder", lambda _, folder: Writes(folder))


def test_only_rank_0_calls_callbacks(compose_config: Compose, calls: Calls) -> None:
    ended = run_on(2, compose_config(*RUN, "callbacks=[recorder]"), FOLDER, before=_writing)
    assert ended == [(0, "budget_spent")] * 2
    assert len(Path("calls.0").read_text().splitlines()) == len(metrics(FOLDER)) > 0
    assert not Path("calls.1").exists()
    assert not calls


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
