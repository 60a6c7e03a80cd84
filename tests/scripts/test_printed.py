"""Scripts that print what is committed: the best points of a search, and the newest constraints."""

import subprocess
import sys

import pytest
import yaml

from scripts.newest import constraints
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


def test_a_report_becomes_sorted_pins_without_what_torch_brings() -> None:
    names = ("torch", "Jinja2", "nvidia-cublas", "nvidia-nvimgcodec-cu13", "cuda-bindings", "triton")
    report = {"install": [{"metadata": {"name": name, "version": "1"}} for name in (*names, "adaecho")]}
    pins = [line for line in constraints(report).splitlines() if not line.startswith("#")]
    assert pins == ["Jinja2==1", "nvidia-nvimgcodec-cu13==1", "torch==1"]


def test_the_committed_file_has_this_form() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pins = [line.split("==") for line in text.splitlines() if not line.startswith("#")]
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in pins]}
    assert constraints(report) == text
