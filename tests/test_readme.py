"""What the README and docs/ print works as printed."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from adaecho.config import schema
from adaecho.run import CONF

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PYTHON = {
    f"{name}-{number}": code
    for name, text in {"README.md": README, **DOCS}.items()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
}
COMMANDS = re.findall(r"^python -m adaecho\.run (.*)$", README, flags=re.MULTILINE)


def test_there_is_something_to_try() -> None:
    assert PYTHON
    assert COMMANDS


@pytest.mark.parametrize("place", PYTHON)
def test_python_blocks_run(place: str) -> None:
    exec(compile(PYTHON[place], place, "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command: str) -> None:
    words = shlex.split(command, comments=True)
    overrides = [word for word in words if "=" in word]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        # The node of Hydra itself is composed too: it holds hydra/launcher= and hydra/sweeper=.
        composed = compose("config", overrides=overrides, return_hydra_config=True)
        schema.from_plain(schema.to_plain(composed))


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?://)([^)#]+)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z]+)\b", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
