"""If storage fails, each command prints one message with file and remedy, and exits with 2."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adaecho import evaluate, run, show
from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.headroom import __main__ as headroom
from adaecho.headroom import pipeline_timer
from adaecho.search import worker
from adaecho.search.design import Arm, Design, record_design
from adaecho.tasks import build_task
from adaecho.tasks.base import Task
from adaecho.training import trial
from tests.conftest import Compose
from tests.datasets.files import write_labeled
from tests.servers import serving
from tests.tasks.test_imagenet import TINY


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAECHO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The url of a server of ``tmp_path``."""
    with serving(tmp_path) as place:
        yield f"http://{place}"


@pytest.mark.parametrize("layout", ["tar", "http", "folders"])
def test_every_command_names_the_file_and_the_remedy_in_one_line(
    compose_config: Compose, tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], layout: str,
) -> None:  # fmt: skip
    data = tmp_path / "data"
    at = [f"data.path={data}"]
    if layout == "http":
        at = [f"data.path={served}/data/train-0.tar", f"task.validation_path={served}/data/val-0.tar"]
    overrides = [*TINY, *at, *([] if layout == "folders" else ["task.num_classes=3"])]

    def restore() -> None:
        write_labeled("folders" if layout == "folders" else "tar", data)

    def build_then_delete(config: Config) -> Task:
        task = build_task(config)
        for path in [path for path in data.rglob("*") if path.is_file()]:
            path.unlink()
        return task

    restore()
    config = compose_config(*overrides)
    trial.run_trial(config, tmp_path / "run")
    longer = from_plain({**to_plain(config), "max_fresh_examples": 24})
    (tmp_path / "sweep").mkdir()
    record_design(Design((Arm("none", (), to_plain(longer)),), 0, 1, 1, 0), tmp_path / "sweep")
    commands: dict[str, Callable[[], object]] = {
        "run": lambda: run.cli(),
        "worker": lambda: worker.main([str(tmp_path / "sweep")]),
        "evaluate": lambda: evaluate.main([str(tmp_path / "run")]),
        "show": lambda: show.main([str(tmp_path / "run")]),
        "headroom": lambda: headroom.cli(),
    }
    for module in (trial, evaluate, pipeline_timer):
        monkeypatch.setattr(module, "build_task", build_then_delete)
    for name, command in commands.items():
        if layout != "http" and name not in ("run", "evaluate"):
            continue  # slow commands
        restore()
        where = ["hydra.run.dir=another", "tracking=none"] if name == "run" else ["step_s=0.1"]
        monkeypatch.setattr(sys, "argv", ["python -m adaecho.run", *overrides, *where])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command()
        said = capsys.readouterr().err
        assert end.value.code == 2, (name, said)
        assert "Traceback" not in said, name
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert re.search(r"(train-0.tar|val-0.tar|\.jpg)\b.*cannot be read", line), (name, line)
        assert "run the same command again" in said, name
