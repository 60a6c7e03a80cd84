"""The benchmarks find what they import from the package: nothing else runs them."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:  # a peer that is not installed
        if (error.name or "").split(".")[0] in ("adaecho", "benchmarks"):
            raise
        pytest.skip(f"measures beside {error.name}, which is not installed; all that is ours was imported")
