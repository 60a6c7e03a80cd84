"""What importing the package and its benchmarks brings."""

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import adaecho
from adaecho.errors import how_to_install

ROOT = Path(__file__).resolve().parent.parent

_DESIGN = """
import sys
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from adaecho.run import CONF
from adaecho.search import sweeper
with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
    hydra = GlobalHydra.instance().hydra
    config = hydra.compose_config("config", ["experiment=fig3", "task=cifar10"], RunMode.MULTIRUN)
    arguments = list(config.hydra.overrides.task)
    design, _ = sweeper.build_design(config, hydra.config_loader, arguments)
assert len(design.arms) > 1
"""


# What each brings must not hold; typed where a results/ is.
ALONE = {
    "the package": ("import adaecho", ["torch"]),
    "its tasks": ("import adaecho.tasks", ["torch"]),
    "a sweep, composed and checked": (_DESIGN, ["torch"]),
    "a config that is printed": (
        "import sys; sys.argv = ['run', '--cfg', 'job']; from adaecho.run import cli; cli()", ["torch"]
    ),
    "training": (
        "import sys; sys.argv = ['run', 'max_steps=1', 'tracking=none']; from adaecho.run import cli; cli()",
        ["torch._dynamo"],
    ),
    "a loop that is watched": (
        "from adaecho import headroom; list(headroom.watch(range(20)))",
        ["hydra", "omegaconf", "torch", "numpy"],
    ),
    "figures": (
        "from adaecho.figures.__main__ import main; main([])",
        ["hydra", "torch", "wandb", "matplotlib.pyplot"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "without"), ALONE.values(), ids=ALONE)
def test_what_takes_long_to_import_is_not_where_nothing_needs_it(
    tmp_path: Path, code: str, without: list[str]
) -> None:
    table = tmp_path / "results/split/digits/trials.json"  # without curves, which take longer to draw
    table.parent.mkdir(parents=True)
    shutil.copy(ROOT / "results/split/digits/trials.json", table)
    tell = "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + tell], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not {*without} & {*done.stdout.splitlines()[-1].split()}


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="EchoLoadr"):
        _ = adaecho.EchoLoadr


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


@pytest.mark.parametrize(
    "name", sorted({file.stem for file in (ROOT / "benchmarks").glob("*.py")} - {"__init__"})
)
def test_a_benchmark_finds_what_it_imports_of_ours(name: str) -> None:
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:  # a peer that is not installed
        if (error.name or "").split(".")[0] in ("adaecho", "benchmarks"):
            raise
        pytest.skip(f"measures beside {error.name}, which is not installed; all that is ours was imported")
