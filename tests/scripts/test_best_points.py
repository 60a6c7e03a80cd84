"""The experiments that try a search's best points again hold what the command prints of its record."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


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
