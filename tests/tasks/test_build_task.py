"""Every task's name leads to a task, and nothing is imported before it is asked for."""

from pathlib import Path

import pytest

from adaecho.config.tasks import find_task, options_class, task_names
from adaecho.errors import ConfigError
from adaecho.tasks import build_task
from tests.conftest import Compose


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.name=mnist", r"task\.name=mnist: is none of cifar10, .*digits.*, no entry point"),
        ("task.name=json", r"task\.name=json: .*json.* has no function build"),
        ("target.metric=bleu", r"target\.metric=bleu: task digits reports accuracy, cross_entropy"),
    ],
)
def test_what_there_is_not_is_told_with_what_there_is(
    compose_config: Compose, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_task(compose_config(override))


def test_an_entry_point_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_package.py").write_text("def build(config, options):\n    return config\n")
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[adaecho.tasks]\ntheir_task = their_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_task("their_task").__name__ == "their_package"
    assert "their_task" in task_names()


def test_options_that_are_no_task_config_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_task.py").write_text("class Options: pass\n\ndef build(config, options): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"task\.name=odd_task: its Options must extend"):
        options_class("odd_task", typed=["odd_task"])
