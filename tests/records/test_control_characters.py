"""Texts out of records that are anyone's: no command hands a terminal a character that it would obey."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adaecho import evaluate, run, show
from adaecho.config.schema import from_plain, to_plain
from adaecho.errors import UserError, fail, say, warn
from adaecho.figures import __main__ as drawing
from adaecho.masking import presentable
from adaecho.records import collect
from adaecho.records.files import read_json, read_yaml, yaml_text
from adaecho.records.terminal import Terminal
from adaecho.search import __main__ as search
from adaecho.search.design import Arm, Design, record_design
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.needs import first_form

Told = Callable[[str, Callable[[], object]], str]
EVIL = "\x1b[2J\x1b[1;1H\x1b]0;owned\x07\r\x08\x9b31m\u202edetaerc\u2028"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

RUN = (
    "task=digits_mlp", "max_steps=4", "evaluate.every_fresh_examples=128", "target.value=0.99",
    "echo.shuffle_buffer=1",
)  # fmt: skip


@pytest.fixture(params=first_form(7, also=[1]))
def every(request: pytest.FixtureRequest) -> int:
    """Of the places in a record every so many-th is spoiled: the gate looks at some of each."""
    return int(request.param)


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a text stands in plain values, keys of dicts among them (as ``("key", name)`` at the end)."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*at, ("key", name))
            yield from leaves(item, (*at, name))
    elif isinstance(value, list):
        for number, item in enumerate(value[:2]):
            yield from leaves(item, (*at, number))
    else:
        yield at


def spoiled(value: Any, at: tuple[Any, ...]) -> Any:
    """The same with control characters in one place, whatever stood there."""
    value = deepcopy(value)
    holder, last = value, at[-1]
    for part in at[:-1]:
        holder = holder[part]
    if isinstance(last, tuple):
        holder[f"{last[1]}{EVIL}"] = holder.pop(last[1])
    else:
        holder[last] = f"{holder[last]}{EVIL}"
    return value


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """What a command prints, which ends with 0, 1 or 2 and is no crash."""

    def call(about: str, command: Callable[[], object]) -> str:
        capsys.readouterr()
        code: object = 0
        try:
            command()
        except SystemExit as end:
            code = end.code
        except Exception as error:
            raise AssertionError(f"{about}: a crash") from error
        assert code in (None, 0, 1, 2), about
        said = capsys.readouterr()
        text = said.out + said.err
        assert not OBEYED.search(text), (about, text)
        return text

    return call


@pytest.fixture
def received(compose_config: Compose, tmp_path: Path) -> Path:
    """A run, a sweep of it, and its tables."""
    config = compose_config(*RUN)
    run_trial(config, tmp_path / "run")
    design = Design((Arm("none", (), to_plain(config)),), 0, 1, 1, 0)
    run_trial(from_plain(design.trial_config(design.arms[0], 0, 0)), tmp_path / "sweep/none/0/0")
    record_design(design, tmp_path / "sweep")
    search.main(["collect", str(tmp_path / "sweep")])
    collect.main([str(tmp_path / "sweep"), "--results", str(tmp_path / "results"), "--command", "typed"])
    return tmp_path


Commands = dict[str, Callable[[], object]]


def _spoil_each_place(path: Path, every: int, told: Told, always: Commands, at_times: Commands) -> None:
    """What commands say where one place of a record is spoiled; every fifth time those that take longer."""
    original = path.read_bytes()
    is_yaml = path.suffix == ".yaml"
    lines = path.read_text().splitlines()
    value = (
        read_yaml(path) if is_yaml else json.loads(lines[-1] if path.suffix == ".jsonl" else "".join(lines))
    )
    for number, at in enumerate(list(leaves(value))[::every]):
        path.write_text((yaml_text if is_yaml else json.dumps)(spoiled(value, at)) + "\n")
        for name, command in (always | at_times if number % 5 == 0 else always).items():
            told(f"{name}: {path.name} {at}", command)
    path.write_bytes(original)


def test_of_a_run(received: Path, told: Told, every: int) -> None:
    path = received / "run"
    to_collect = [str(path), "--experiment", "x", "--results", str(received / "out")]
    always: Commands = {"collect": lambda: collect.main(to_collect)}
    longer: Commands = {
        "evaluate": lambda: evaluate.main([str(path)]),
        "show": lambda: show.main([str(path), "--number", "1"]),
    }
    for name in ("config.yaml", "summary.json"):
        _spoil_each_place(path / name, every, told, always, longer)
    _spoil_each_place(path / "metrics.jsonl", every, told, always, {})


def test_of_a_sweep(received: Path, told: Told, every: int) -> None:
    sweep = received / "sweep"
    status, collect_it = (partial(search.main, [command, str(sweep)]) for command in ("status", "collect"))
    for path in (sweep / "design.json", sweep / "none/0/0/summary.json"):
        _spoil_each_place(path, every, told, {"status": status}, {"collect": collect_it})


def test_of_tables(received: Path, told: Told, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    monkeypatch.setattr(drawing, "draw_table", lambda *_: [])  # which takes seconds, and prints nothing
    table, report = received / "results/sweep/digits", received / "results/figures/report.md"

    def figures() -> None:
        drawing.main(["--results", str(received / "results")])
        assert not report.exists() or not OBEYED.search(report.read_text())

    _spoil_each_place(table / "origin.json", every, told, {"figures": figures}, {})
    (table / "origin.json").write_text("{}")  # whoever sends a table sends its digest
    for name in ("trials.json", "curves.json"):
        if (table / name).exists():
            _spoil_each_place(table / name, every, told, {"figures": figures}, {})


def test_of_what_a_finished_run_says_again(
    received: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = received / "run/summary.json"
    summary = read_json(path)
    monkeypatch.setattr(sys, "argv", ["adaecho", *RUN, "tracking=none", f"hydra.run.dir={received / 'run'}"])
    assert "4 steps" in told("run", run.cli)
    for at in (("best", "metric"), ("model", ("key", "final")), ("model", "final"), ("status",)):
        path.write_text(json.dumps(spoiled(summary, at)))
        told(f"run: {at}", run.cli)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\r\x7f\x9b", "\\r\\x7f\\x9b"),
        ("\u202egnp.exe\u2069", "\\u202egnp.exe\\u2069"),
        ("na\udcefve.jpg", "na\\udcefve.jpg"),
        ("naïve \u56fe \U0001f600 \\x1b", "naïve \u56fe \U0001f600 \\x1b"),
    ],
)
def test_what_becomes_of_a_text(text: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert presentable(text) == presentable(presentable(text)) == printed
    assert str(UserError(text)) == printed
    say(text)
    warn(text)
    with pytest.raises(SystemExit):
        fail(text)
    said = capsys.readouterr()
    assert said.out == f"{printed}\n"
    assert said.err == f"warning: {printed}\nerror: {printed}\n"
    Terminal(markup=False, width=80).print(text)
    assert capsys.readouterr().out.replace("        ", "\t").startswith(printed.partition("\t")[0])
