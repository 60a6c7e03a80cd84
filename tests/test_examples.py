"""Every program in examples/ prints what it is to show, and what docs/ prints of trainers runs."""

from importlib.util import find_spec

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
    "headroom_lightning": "of the time was lost to waiting",
    "headroom_transformers": "of the time was lost to waiting",
    "transformers_loop": "16 steps, 128 examples read",
    "lightning_loop": "32 steps from 512 examples read",
    "ddp_loop": "rank 1: 8 steps an epoch, 256 examples, 2 epochs",
}
RANKS = {"ddp_loop": 2}
BLOCKS = {place: imported(code) for place, code in PYTHON.items() if imported(code)}
Said = dict[str, tuple[int, str]]


def absent(name: str) -> list[str]:
    """The libraries that a program or block needs and that are not installed."""
    needed = BLOCKS.get(name) or [one for one in ("grain", "lightning", "ray", "transformers") if one in name]
    return [library for library in needed if find_spec(library) is None]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Exit status and output of all of them."""
    listed = {
        name: {
            "path": str(ROOT / "examples" / f"{name}.py"),
            **({"ranks": RANKS[name]} if name in RANKS else {}),
        }
        for name in SAYS
    } | {place: {"code": PYTHON[place]} for place in BLOCKS}
    listed = {name: program for name, program in listed.items() if not absent(name)}
    return programs.run(listed, tmp_path_factory.mktemp("programs"))


def test_every_example_is_tried() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.timeout(600)  # the first waits for all
@pytest.mark.parametrize("name", [*SAYS, *BLOCKS])
def test_an_example_or_a_block_of_a_trainer_runs(name: str, request: pytest.FixtureRequest) -> None:
    if absent(name):
        extra = "ray" if absent(name) == ["ray"] else "trainers"
        pytest.skip(f"{', '.join(absent(name))} is not installed: pip install '.[{extra}]'")
    status, text = request.getfixturevalue("said")[name]
    assert status == 0, text
    assert SAYS.get(name, "") in text
