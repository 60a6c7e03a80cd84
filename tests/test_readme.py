"""What the README and docs/ print works as printed."""

import functools
import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from adaecho.config import scale, schema
from adaecho.run import CONF

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PYTHON = {
    f"{name}-{number}": code
    for name, text in {"README.md": README, **DOCS}.items()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
}
COMMANDS = re.findall(r"^python -m adaecho\.run (.*)$", README + DOCS["framework.md"], flags=re.MULTILINE)


def test_there_is_something_to_try() -> None:
    assert PYTHON
    assert COMMANDS


# Of the extra `trainers`. They warn at import and change global settings: each block is a fork
# of a process that has imported them, which takes longer than all the blocks.
TRAINERS = ("accelerate", "grain", "lightning", "transformers", "webdataset")
IMPORTED = {
    place: re.findall(rf"^(?:import|from) ({'|'.join(TRAINERS)})\b", code, flags=re.MULTILINE)
    for place, code in PYTHON.items()
}
_FORKS = """
import importlib, json, os, sys, tempfile, traceback
from contextlib import suppress
trainers, blocks = json.load(sys.stdin)
for name in ("torch", "adaecho.echo.loader", *trainers):
    with suppress(ImportError):
        importlib.import_module(name)
said = {}
for place, code in blocks.items():
    with tempfile.TemporaryFile("w+") as output:
        if not (pid := os.fork()):
            status = 1
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                exec(compile(code, place, "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        failed = os.waitpid(pid, 0)[1] != 0
        output.seek(0)
        said[place] = f"failed: {output.read()}" if failed else ""
print(json.dumps(said))
"""


@functools.cache
def _said_by_blocks_of_trainers() -> dict[str, str]:
    """What each of these blocks said where it failed, else nothing."""
    blocks = {place: code for place, code in PYTHON.items() if IMPORTED[place]}
    done = subprocess.run(
        [sys.executable, "-c", _FORKS], input=json.dumps([TRAINERS, blocks]),
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("place", [place for place in PYTHON if not IMPORTED[place]])
def test_python_blocks_run(place: str) -> None:
    exec(compile(PYTHON[place], place, "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("place", [place for place in PYTHON if IMPORTED[place]])
def test_python_blocks_of_other_trainers_run(place: str) -> None:
    for name in IMPORTED[place]:
        if find_spec(name) is None:
            pytest.skip(f"{name} is absent; pip install '.[trainers]'")
    assert not _said_by_blocks_of_trainers()[place]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_size_at", lambda *_: scale.Size(714, 714, has_validation=False))
    words = shlex.split(command, comments=True)
    overrides = [word for word in words if "=" in word]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        # The node of Hydra itself is composed too: it holds hydra/launcher= and hydra/sweeper=.
        composed = compose("config", overrides=overrides, return_hydra_config=True)
        schema.from_typed(schema.to_plain(composed))


@pytest.mark.parametrize(
    "page", sorted({ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/*/*.md")})
)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_figures_in_the_repository_are_those_that_a_page_shows() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/*/*.md")]
    shown = {name for page in pages for name in re.findall(r"results/figures/[\w.]+\.png", page.read_text())}
    command = ["git", "-C", str(ROOT), "ls-files", "results/figures"]
    assert set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()) == shown


def test_the_readme_is_short_and_begins_with_code_to_copy() -> None:
    assert len(README.split()) <= 1300
    assert "EchoLoader(" in "\n".join(README.splitlines()[:60])


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z]+)\b", README + DOCS["framework.md"]):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
