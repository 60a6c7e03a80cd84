"""Every program in examples/ runs, and prints what it is to show."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAYS = {
    "plain_loop": "pass 2: 1536 examples read",
    "resume": "20 batches, the same as without the break",
    "slow_store": "examples read for 60 batches",
    "grain_pipeline": "150 batches of 1000 examples; resumed after 60: True",
    "ray_data": "rank 1: 40 steps from 640 fresh examples in 2 epochs",
    "detection": "40 images read, 80 trained on",
    "headroom_lightning": "of the time was lost to waiting",
    "headroom_transformers": "of the time was lost to waiting",
    "lightning_loop": "32 steps from 512 examples read",
    "ddp_loop": "rank 1: 8 steps an epoch, 256 examples, 2 epochs",
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_every_example_is_tried() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(tmp_path: Path, name: str) -> None:
    for library in ("grain", "lightning", "ray", "transformers"):
        if library in name and find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install {library}")
    done = subprocess.run(
        [sys.executable, *(TORCHRUN if name == "ddp_loop" else []), str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
