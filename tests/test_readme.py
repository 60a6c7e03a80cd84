"""The code, commands and links of README and docs/ work, and generated pages are current."""

import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from hydra import compose, initialize_config_dir

from adaecho.config import schema, size_defaults
from adaecho.config.tasks import Size
from adaecho.run import CONF
from scripts import api_page, config_page
from tests.programs import DOCS, PYTHON, README, ROOT, imported

COMMANDS = re.findall(r"^python -m adaecho\.run (.*)$", README + DOCS["framework.md"], flags=re.MULTILINE)


@pytest.mark.parametrize("place", [place for place in PYTHON if not imported(PYTHON[place])])
def test_python_blocks_run(place: str) -> None:
    exec(compile(PYTHON[place], place, "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_defaults, "_size_at", lambda *_: Size(714, 714, has_validation=False))
    overrides = [word for word in shlex.split(command, comments=True) if "=" in word]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        # Hydra's own config holds hydra/launcher= and hydra/sweeper=.
        composed = compose("config", overrides=overrides, return_hydra_config=True)
        schema.from_plain(schema.to_plain(composed))


PAGES = [
    ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("experiments/**/*.md")),
    ROOT / "results/README.md",
]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_figures_in_the_repository_are_those_that_a_page_shows() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    shown = {name for page in PAGES for name in re.findall(r"results/figures/[\w.]+\.png", page.read_text())}
    command = ["git", "-C", str(ROOT), "ls-files", "results/figures"]
    assert set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()) == shown


def test_the_readme_is_short_and_begins_with_code_to_copy() -> None:
    assert len(README.split()) <= 800
    assert "EchoLoader(" in "\n".join(README.splitlines()[:45])


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z]+)\b", README + DOCS["framework.md"]):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.parametrize(("name", "script"), [("api.md", api_page), ("configuration.md", config_page)])
def test_a_generated_page_is_current(name: str, script: ModuleType) -> None:
    remedy = f"run: python scripts/{script.__name__.rpartition('.')[2]}.py > docs/{name}"
    assert (ROOT / "docs" / name).read_text() == script.page(), remedy


def test_every_public_name_and_every_key_is_described() -> None:
    for module in ("adaecho", "adaecho.echo", "adaecho.adascale", "adaecho.shards"):
        for name in import_module(module).__all__:
            assert any(name in names for names in api_page.PUBLIC.values()), f"{module}.{name}"
    assert [row for row in api_page.rows() if not row[2]] == []
    keys = [line for line in config_page.page().splitlines() if line.startswith("| `")]
    assert len(keys) > 60
    assert [row for row in keys if row.endswith("|  |")] == []
