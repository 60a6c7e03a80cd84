"""What importing the package brings."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from adaecho.errors import how_to_install

ROOT = Path(__file__).resolve().parent.parent


def _python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_torch() -> None:
    _python("import sys, adaecho; assert 'torch' not in sys.modules")


_DESIGN = """
import sys
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from adaecho.run import CONF
from adaecho.config.schema import to_plain
from adaecho.search import sweeper
from adaecho.search.arms import parse_typed
with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
    hydra = GlobalHydra.instance().hydra
    config = hydra.compose_config("config", ["experiment=fig3", "task=cifar10"], RunMode.MULTIRUN)
    typed = parse_typed(list(config.hydra.overrides.task), hydra.config_loader)
    design = sweeper.build_design(config, to_plain(config), typed, hydra.config_loader)
assert len(design.arms) > 1
assert "torch" not in sys.modules
"""


def test_a_sweep_is_composed_and_checked_without_torch() -> None:
    _python(_DESIGN)


def test_a_misspelt_name_is_an_attribute_error() -> None:
    _python(
        "import adaecho\n"
        "try: adaecho.EchoLoadr\n"
        "except AttributeError as error: assert 'EchoLoadr' in str(error)\n"
        "else: raise SystemExit(1)"
    )


def test_every_extra_that_a_text_names_can_be_installed_from_the_checkout() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    code = [*(ROOT / "adaecho").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    named: set[str] = set()
    for file in [*pages, *code]:
        text = file.read_text()
        assert "pip install " + "'adaecho[" not in text, f"{file}: no version is on an index"
        for found in re.findall(r"pip install (?:-e )?'\.\[([\w,]+)\]'", text):
            named |= {*found.split(",")}
    assert named >= {"run", "figures", "regions"}
    assert named <= extras.keys()
    assert how_to_install("images") == "pip install '.[images]' in the checkout of adaecho"
