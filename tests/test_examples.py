"""Every program in examples/ prints its expected line; the blocks for trainers in docs/ run."""

import re
from importlib.util import find_spec
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests import programs
from tests.programs import PYTHON, ROOT, imported

SAYS = {
    "plain_loop": "pass 2: 1536 examples read",
    "resume": "20 batches, the same as without the break",
    "slow_store": "examples read for 60 batches",
    "grain_pipeline": "150 batches of 1000 examples; resumed after 60: True",
    "ray_data": "rank 1: 40 steps from 640 fresh examples in 2 epochs",
    "detection": "40 images read, 80 trained on",
    "headroom_lightning": "of the time was spent waiting",
    "headroom_transformers": "of the time was spent waiting",
    "transformers_loop": "16 steps, 128 examples read",
    "lightning_loop": "32 steps from 512 examples read",
    "ddp_loop": "rank 1: 8 steps an epoch, 256 examples, 2 epochs",
}
RANKS = {"ddp_loop": 2}
BLOCKS = {block: imported(code) for block, code in PYTHON.items() if imported(code)}
Said = dict[str, tuple[int, str]]


def absent(name: str) -> list[str]:
    """Missing libraries of a program or block."""
    needed = BLOCKS.get(name) or [one for one in ("grain", "lightning", "ray", "transformers") if one in name]
    return [library for library in needed if find_spec(library) is None]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Exit status and output of all programs and blocks."""
    listed = {
        name: {
            "path": str(ROOT / "examples" / f"{name}.py"),
            **({"ranks": RANKS[name]} if name in RANKS else {}),
        }
        for name in SAYS
    } | {block: {"code": PYTHON[block]} for block in BLOCKS}
    listed = {name: program for name, program in listed.items() if not absent(name)}
    return programs.run(listed, tmp_path_factory.mktemp("programs"))


def test_every_example_has_an_expected_line() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.timeout(600)  # the first test runs all programs
@pytest.mark.parametrize("name", [*SAYS, *BLOCKS])
def test_an_example_or_block_runs(name: str, request: pytest.FixtureRequest) -> None:
    if absent(name):
        extra = "ray" if absent(name) == ["ray"] else "trainers"
        pytest.skip(f"{', '.join(absent(name))} is not installed: pip install '.[{extra}]'")
    status, text = request.getfixturevalue("said")[name]
    assert status == 0, text
    assert SAYS.get(name, "") in text


@pytest.mark.other_forms  # starting a Jupyter kernel takes 14 s
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the kernel of the notebook
    book = nbformat.read(ROOT / "examples" / "headroom.ipynb", as_version=4)
    assert len(book.cells) == 10
    assert not any(cell.get("outputs") for cell in book.cells), "the notebook is stored without outputs"
    nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(one.get("text", "") for cell in book.cells for one in cell.get("outputs", []))
    assert "of the time was spent waiting" in said
    assert "1280 examples read in" in said
    losses = [float(one) for one in re.findall(r"loss ([\d.]+) without echoing, ([\d.]+) with", said)[0]]
    assert losses[1] < losses[0]
