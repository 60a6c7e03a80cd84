"""Every task's name leads to a task, and nothing is imported before it is asked for."""

import subprocess
import sys

import pytest

from adaecho.errors import ConfigError
from adaecho.run import CONF
from adaecho.tasks import TASKS, build_task
from tests.conftest import Compose


@pytest.mark.parametrize("name", [file.stem for file in sorted((CONF / "task").glob("*.yaml"))])
def test_every_config_of_a_task_names_one_that_exists(compose_config: Compose, name: str) -> None:
    assert compose_config(f"task={name}").task.name in TASKS


def test_an_unknown_task_names_those_there_are(compose_config: Compose) -> None:
    with pytest.raises(ConfigError, match=r"task\.name=mnist: must be one of digits, digits_mlp, cifar10"):
        build_task(compose_config("task.name=mnist"))


def test_an_unknown_target_metric_names_those_the_task_has(compose_config: Compose) -> None:
    message = r"target\.metric=bleu: task digits reports accuracy, cross_entropy"
    with pytest.raises(ConfigError, match=message):
        build_task(compose_config("target.metric=bleu"))


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, adaecho.tasks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
