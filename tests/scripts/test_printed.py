"""What scripts/best_points.py prints is what is committed."""

import subprocess
import sys

import pytest
import yaml

from tests.scripts.load import SCRIPTS

ROOT = SCRIPTS.parent


@pytest.mark.parametrize(
    ("experiment", "arguments"),
    [
        ("quickstart_points", ["results/quickstart_search/digits/trials.json", "5"]),
        ("fig3_winners", ["results/fig3/digits/trials.json"]),
    ],
)
def test_it_prints_the_arms_of_the_experiment(experiment: str, arguments: list[str]) -> None:
    command = [sys.executable, "scripts/best_points.py", *arguments]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    config = yaml.safe_load((ROOT / "conf" / "experiment" / f"{experiment}.yaml").read_text())
    assert yaml.safe_load(printed)["search"]["arms"] == config["search"]["arms"]
