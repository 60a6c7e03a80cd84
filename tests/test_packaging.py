"""The sdist and the wheel, built from the project, then installed and used without a checkout."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, folder=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        opened.extractall(folder / "source")
    (source,) = (folder / "source").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, folder=source)
    return folder


def test_the_wheel_holds_the_package_its_configs_and_its_types(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {f"adaecho/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "adaecho").rglob("*.py")} <= names
    assert {"adaecho/py.typed", "hydra_plugins/adaecho_quasirandom/__init__.py"} <= names
    others = {name.split("/")[0] for name in names} - {"adaecho", "hydra_plugins"}
    assert [name.endswith(".dist-info") for name in others] == [True]


@pytest.fixture(scope="module")
def bin_folder(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment with the wheel and the dependencies of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    here = {"base": str(folder), "platbase": str(folder)}
    (site_packages,) = {Path(sysconfig.get_path(kind, "venv", here)) for kind in ("purelib", "platlib")}
    # Python does not follow *.pth files in these folders, such as that of an editable install.
    (site_packages / "needs.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", wheel, folder=folder)
    return folder / "bin"


def test_the_wheel_runs_the_quickstart_and_draws_it(bin_folder: Path, tmp_path: Path) -> None:
    less = ("search.repeats=1", "target.value=0.2", "search.workers=1", "tracking=none")
    run(bin_folder / "adaecho", "-m", "experiment=quickstart", *less, folder=tmp_path)
    folder = tmp_path / "runs" / "quickstart" / "digits"
    assert len(list(folder.glob("*/0/*/summary.json"))) == 7
    assert (folder / "fig3.png").read_bytes().startswith(b"\x89PNG")


_DROP_INS = """
import importlib.util
import sys
from importlib.machinery import PathFinder

class TorchAndNumpyAlone(PathFinder):
    # What torch itself requires counts as torch.
    names = {"adaecho", "torch", "torchgen", "functorch", "numpy", "typing_extensions", "sympy", "mpmath",
        "filelock", "networkx", "jinja2", "markupsafe", "fsspec", "triton", "nvidia"}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = super().find_spec(name, path, target)
        if found is None or path is not None or name in cls.names:
            return found
        of_others = "site-packages" in f"{found.origin} {found.submodule_search_locations}"
        return None if of_others else found

sys.meta_path[sys.meta_path.index(PathFinder)] = TorchAndNumpyAlone
import numpy as np, torch
import adaecho
from adaecho import AdaScale, EchoLoader

rows = {"x": np.arange(64, dtype=np.float32)[:, None]}
for echo in ("none", "batch", "example_before_augmentation", "example_after_augmentation"):
    factor = 1 if echo == "none" else 2
    loader = EchoLoader(rows, batch_size=8, epochs=1, echo=echo, factor=factor, shuffle_buffer=16)
    seen = np.concatenate([batch["x"].ravel() for batch in loader])
    assert np.array_equal(np.bincount(seen.astype(int), minlength=64), np.full(64, factor)), echo

model = torch.nn.Linear(1, 1)
optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=1e-4), num_gradients_to_accumulate=2)
before = model.weight.detach().clone()
for _ in range(2):
    for half in torch.randn(2, 8, 1):
        (model(half).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
assert not torch.equal(model.weight, before)
assert importlib.util.find_spec("hydra") is None
print(adaecho.__file__)
"""


def test_the_drop_ins_of_the_wheel_need_torch_and_numpy_alone(bin_folder: Path, tmp_path: Path) -> None:
    file = Path(run(bin_folder / "python", "-c", _DROP_INS, folder=tmp_path).strip())
    assert file.is_relative_to(bin_folder.parent)


def test_the_version_is_the_same_everywhere(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    version = wheel.name.split("-")[1]
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == version
    assert re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


def test_the_long_description_leads_out_of_the_index(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [one for one in opened.namelist() if one.endswith("METADATA")]
        text = opened.read(name).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    at = "https://raw.githubusercontent.com/OWNER/adaecho/main"
    assert f"{at}/results/figures/quickstart_digits.png" in links
