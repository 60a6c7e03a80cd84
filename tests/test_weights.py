"""Weights in the repository give the figures of their cards."""

import json
from pathlib import Path

import pytest

from adaecho.evaluate import evaluate
from adaecho.records.trials import read_rows
from scripts.keep_weights import WEIGHTS, card

KEPT = sorted(path.parent for path in WEIGHTS.glob("*/README.md"))


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_the_card_says_what_the_records_beside_it_say(folder: Path) -> None:
    assert (folder / "README.md").read_text() == card(folder)


def test_the_weights_of_digits_are_a_run_of_the_quickstart_and_give_its_accuracy() -> None:
    folder = WEIGHTS / "digits"
    (found,) = evaluate(folder)
    assert found.recorded is not None
    assert found.metrics["accuracy"] == pytest.approx(found.recorded["accuracy"], abs=1.5 / 360)
    assert found.metrics["cross_entropy"] == pytest.approx(found.recorded["cross_entropy"], rel=0.01)
    assert _row_of(folder, "quickstart/digits", "example_before_e4") == found.recorded["accuracy"]


def test_the_weights_of_depth_8_are_a_run_of_its_record() -> None:
    folder = WEIGHTS / "depth8_cifar10"
    evaluations = (folder / "metrics.jsonl").read_text().splitlines()
    accuracy = json.loads(evaluations[-1])["accuracy"]
    assert _row_of(folder, "cifar10_depth8_80/cifar10", "example_before_e2") == accuracy


def _row_of(folder: Path, record: str, arm: str) -> float:
    """The best value in the record of the run with the seed of these weights, which read as much."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = read_rows(WEIGHTS.parent / record / "trials.json")
    (row,) = [row for row in rows if row["arm"] == arm and row["seed"] == summary["seed"]]
    assert row["fresh_examples"] == summary["fresh_examples"]
    return row["best_value"]
