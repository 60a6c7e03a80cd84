"""The page that adds a task: its file, its YAML and its commands, as they stand there."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from adaecho.config.schema import from_typed, to_plain
from adaecho.search import axes
from tests.conftest import Command, Compose
from tests.forks import typed
from tests.programs import blocks, commands, write

BLOCKS = blocks("A task")
SMALL = ["tracking=none", "max_steps=12", "target.value=null"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project: the files of the page."""
    write(BLOCKS, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tumours", raising=False)
    return tmp_path


@pytest.mark.parametrize("line", commands(BLOCKS))
def test_every_command_of_the_page_runs(project: Path, command: Command, line: str) -> None:
    python, _, module, *arguments = shlex.split(line)
    assert python == "python"
    arguments += ["step_s=0.01"] if module == "adaecho.headroom" else SMALL
    if "-m" in arguments:  # its workers find the task from where the command was started
        code, out, error = typed(module, *arguments, folder=project, forks_workers=True)
    else:
        code, out, error = command(module, *arguments)
    assert code == 0, out + error
    if module == "adaecho.headroom":
        assert "R = t_upstream / t_downstream" in out
        return
    summaries = [json.loads(path.read_text()) for path in project.rglob("summary.json")]
    assert {summary["status"] for summary in summaries} == {"budget_spent"}
    assert len(summaries) == (4 if " -m task" in line else 1)
    assert all("optimizer.learning_rate" in summary["hyperparameters"] for summary in summaries)
    if " -m task" in line:
        assert len({summary["hyperparameters"]["task.hidden"] for summary in summaries}) > 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.hidden=many", "task.hidden"),
        ("task.hidden=0", "task.hidden=0: must be at least 1"),
        ("+task.depth=1", "task.depth: task tumours has no such option; it has hidden, noise"),
    ],
)
@pytest.mark.usefixtures("project")
def test_its_options_are_checked(command: Command, override: str, message: str) -> None:
    code, _, error = command("adaecho.run", "--config-dir", "conf", "task=tumours", override, *SMALL)
    assert code == 2
    assert message in error
    assert "Traceback" not in error


@pytest.mark.usefixtures("project")
def test_its_options_have_types_for_a_search(compose_config: Compose) -> None:
    import tumours  # type: ignore[import-not-found]

    plain = {**to_plain(compose_config("task=digits")), "task": {"name": "tumours", "hidden": 8}}
    config = from_typed(plain)
    assert isinstance(config.task, tumours.Options)
    assert (config.task.hidden, config.task.noise) == (8, 0.0)
    assert axes.parse("task.hidden", "interval(4, 64)", options=tumours.Options).integer
