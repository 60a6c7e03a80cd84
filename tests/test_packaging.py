"""The sdist and the wheel: built from the project, then used from where no checkout is."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, folder: Path, path: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": "" if path is None else str(path)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    run("-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), folder=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        opened.extractall(folder / "source")
    (source,) = (folder / "source").iterdir()
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), folder=source)
    return folder


def names_in(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def test_the_wheel_holds_the_package_its_configs_and_its_types(built: Path) -> None:
    names = names_in(built)
    conf = {f"adaecho/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "adaecho").rglob("*.py")}
    assert conf <= names
    assert code <= names
    assert {"adaecho/py.typed", "adaecho/headroom/expected.json"} <= names
    assert "hydra_plugins/adaecho_quasirandom/__init__.py" in names
    others = {name.split("/")[0] for name in names} - {"adaecho", "hydra_plugins"}
    assert [name.endswith(".dist-info") for name in others] == [True]


def test_the_wheel_runs_where_no_checkout_is(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(installed)
    (scripts,) = installed.glob("*.dist-info/entry_points.txt")
    assert "adaecho = adaecho.run:cli" in scripts.read_text()
    code = "import adaecho, adaecho.run as run; print(adaecho.__file__); run.cli()"
    output = run("-c", code, "task=digits", "--cfg", "job", folder=tmp_path, path=installed)
    assert output.startswith(str(installed))
    assert "name: digits" in output
