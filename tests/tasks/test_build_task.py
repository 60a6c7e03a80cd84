"""Tasks are found by name; the example of docs/your-own.md works, and its mistakes get one message."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from adaecho.config.tasks import find_task, options_class
from adaecho.errors import ConfigError
from adaecho.tasks import build_task
from tests.conftest import Command, Compose
from tests.forks import typed
from tests.programs import blocks, commands, write


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.name=mnist", r"task\.name=mnist: expected one of .*digits.*cifar10"),
        ("task.name=json", r"task\.name=json: .*json.* has no function build"),
        ("target.metric=bleu", r"target\.metric=bleu: task digits reports accuracy, cross_entropy"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_names(
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


def test_options_that_are_no_task_config_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_task.py").write_text("class Options: pass\n\ndef build(config, options): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"task\.name=odd_task: its Options must extend"):
        options_class("odd_task")


# File, YAML and commands of the page that adds a task.
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
        (
            "+task.depth=1",
            "task.depth: Key 'depth' not in 'Options'; options of tumours: name, hidden, noise",
        ),
    ],
)
@pytest.mark.usefixtures("project")
def test_its_options_are_checked(command: Command, override: str, message: str) -> None:
    code, _, error = command("adaecho.run", "--config-dir", "conf", "task=tumours", override, *SMALL)
    assert code == 2
    assert message in error
    assert "Traceback" not in error


MISTAKES = {
    "a direction": ('"max"}', '"maximize"}', "metrics has 'maximize' for accuracy; use 'max'"),
    "another metric": ('{"accuracy": float', '{"acc": float', "evaluate returned {'acc': "),
    "no dict": ('{"accuracy": float(right.mean())}', "0.5", "evaluate returned 0.5, expected"),
    "nothing to train": ("nn.Sequential(\n", "nn.Identity(\n", "model has nothing to train"),
    "no task": ("return Task(", "Task(", "build returned a NoneType, expected a Task"),
    "no dataclass": ("@dataclass\n", "", "options of tumours: name"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_it_is_one_line(project: Path, command: Command, mistake: str) -> None:
    right, wrong, message = MISTAKES[mistake]
    task = (project / "tumours.py").read_text()
    assert task.count(right) == 1
    (project / "tumours.py").write_text(task.replace(right, wrong))
    code, _, error = command("adaecho.run", "--config-dir", "conf", "task=tumours", *SMALL)
    assert (code, message in error, "Traceback" in error) == (2, True, False), error
