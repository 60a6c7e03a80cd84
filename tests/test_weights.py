"""Weights in the repository give the figures of their cards."""

import json
from pathlib import Path

import pytest

from adaecho.evaluate import evaluate
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
    summary = json.loads((folder / "summary.json").read_text())
    table = json.loads((WEIGHTS.parent / "quickstart" / "digits" / "trials.json").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    (row,) = [row for row in rows if row["arm"] == "example_before_e4" and row["seed"] == summary["seed"]]
    assert row["best_value"] == found.recorded["accuracy"]
    assert row["fresh_examples"] == summary["fresh_examples"]
