"""The section on your own experiment runs: its YAML, its commands and its analysis."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

from tests.forks import typed
from tests.programs import blocks, commands, write

BLOCKS = blocks("An experiment")
SMALL = ["tracking=none", "max_fresh_examples=320", "target.value=0.1", "search.trials=2", "search.repeats=1"]


def test_the_page_runs_from_its_yaml_to_its_figure() -> None:
    write(BLOCKS, Path())
    assert len(commands(BLOCKS)) == 4
    for line in commands(BLOCKS):
        python, _, module, *arguments = shlex.split(line)
        more = SMALL if module == "adaecho.run" else []
        done = typed(module, *arguments, *more, forks_workers=True)
        assert (python, done.code) == ("python", 0), done.out + done.err
    arms = json.loads(Path("results/two_nets/digits/outcome.json").read_text())
    compared = {arm["arm"]: arm["baseline"] for arm in arms}
    assert compared["conv_batch_e2"] == "conv"
    assert compared["mlp_batch_e2"] == "mlp"
    assert Path("results/figures/report.md").exists()
    printed = subprocess.check_output([sys.executable, "analysis.py"], text=True)
    assert "mlp_batch_e2 compared with mlp" in printed
    assert len(printed.splitlines()) == 12, "a line for each arm, and for each trial"
