"""What a killed collect or drawing of figures left half-written is gone after the next one."""

from pathlib import Path

import pytest

from adaecho.figures.__main__ import main as figures
from adaecho.records import collect
from adaecho.training.trial import run_trial
from tests.conftest import Compose


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*.tmp"))


@pytest.fixture
def tables(tmp_path: Path, compose_config: Compose) -> Path:
    often = ("evaluate.every_fresh_examples=64", "echo.shuffle_buffer=1")
    run_trial(compose_config("task=digits_mlp", "max_steps=9", "target.value=null", *often), tmp_path / "run")
    collect.main([str(tmp_path / "run"), "--experiment", "mine", "--results", str(tmp_path / "results")])
    return tmp_path / "results/mine/digits"


def test_of_a_killed_collect(tables: Path, tmp_path: Path) -> None:
    for name in ("origin.json", "trials.json", "curves.json"):
        (tables / f".{name}.0123456789ab.tmp").write_text("[")
    collect.main([str(tmp_path / "run"), "--experiment", "mine", "--results", str(tmp_path / "results")])
    assert not leftovers(tables)


def test_of_killed_figures(tables: Path) -> None:
    results = tables.parents[1]
    (results / "figures").mkdir()
    (results / "figures/.mine_digits.png.0123456789ab.tmp").write_text("")
    figures(["--results", str(results)])
    assert (results / "figures/report.md").exists()
    assert not leftovers(results)
