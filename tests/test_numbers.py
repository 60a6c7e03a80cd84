"""Numbers in the texts and committed weights equal the committed records."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adaecho.evaluate import evaluate
from adaecho.figures.tables import read_tables
from adaecho.records.files import read_json
from adaecho.records.table import summarize
from adaecho.records.trials import read_rows
from experiments.evidence.decisions import decide_all
from experiments.evidence.page import claims_page
from experiments.evidence.predicted_time import section_of_cells

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "results" / "weights"
Said = Iterator[tuple[str, str]]
"""Pages and the texts that their records imply."""


def test_the_page_of_claims_is_what_the_records_say() -> None:
    tables = read_tables(ROOT / "results")
    decided = decide_all(tables)
    page = claims_page(decided, {name: rows for name, (rows, _) in tables.items()}, ROOT / "results")
    assert (ROOT / "docs" / "claims.md").read_text() == page, "make figures writes it again"


def test_every_decided_verdict_has_the_one_of_the_rule_before_beside_it() -> None:
    earlier = json.loads((ROOT / "results" / "earlier_verdicts.json").read_text())["verdicts"]
    measured_since = {"fig8_early"}  # with the rule of today
    decided = [one for one in decide_all(read_tables(ROOT / "results")) if one.effect]
    found = {(one.claim.key, one.task) for one in decided if one.claim.experiment not in measured_since}
    assert found == {(one["claim"], one["task"]) for one in earlier}


def _records(name: str) -> pytest.MarkDecorator:
    found = sorted((ROOT / "results").glob(f"*/*/{name}"))
    return pytest.mark.parametrize("file", found, ids=lambda path: path.parts[-3])


@_records("trials.json")
def test_every_outcome_is_what_its_trials_say(file: Path) -> None:
    recorded = json.loads(file.with_name("outcome.json").read_text())
    assert _rounded(recorded) == _rounded(summarize(read_rows(file)))


@_records("origin.json")
def test_every_record_has_the_digests_of_its_tables(file: Path) -> None:
    digests = json.loads(file.read_text())["sha256"]
    assert digests
    assert digests == {
        name: hashlib.sha256(file.with_name(name).read_bytes()).hexdigest() for name in digests
    }


def _rounded(value: Any) -> Any:
    """Round to ten digits, because interpreters sum in different orders."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_rounded, value))
    return float(f"{value:.10g}") if isinstance(value, float) else value


def test_ratios_on_the_page_of_fig3_are_on_the_page_of_claims() -> None:
    page = (ROOT / "experiments" / "fig3" / "README.md").read_text()
    table = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    ratios = re.findall(r"(\d\.\d\d) \((\d\.\d\d to \d\.\d\d)\)", table)
    assert len(ratios) == 10  # three arms on digits and CIFAR-10, two on text, and two of Fig. 7
    claims = (ROOT / "docs" / "claims.md").read_text()
    assert [(a, b) for a, b in ratios if f"{a} ({b})" not in claims and f"| {a} | {b} |" not in claims] == []


def test_the_verdicts_on_predicted_time_are_their_record() -> None:
    record = read_json(ROOT / "results" / "predicted_time" / "paced" / "cells.json")
    section = section_of_cells("", record, "")
    assert "digits: does not hold, 7 of 9 cells" in section
    assert "cifar10: holds, 9 of 9 cells" in section


def _of_wall_time() -> Said:
    folder = ROOT / "results" / "fig4" / "cifar10"
    assert {(arm["reached"], arm["searches"]) for arm in read_json(folder / "outcome.json")} == {(5, 5)}
    rows = read_rows(folder / "trials.json")
    ratios = sorted(row["R"] for row in rows)
    for text in (
        f"R was {ratios[0]:.1f} to {ratios[-1]:.1f}",
        f"a median of {ratios[len(ratios) // 2]:.1f}.",
        f"{sum(row['train_time_s'] for row in rows):.0f} s of training",
    ):
        yield "experiments/fig4/README.md", text


def _of_echoing() -> Said:
    for record, page in (
        ("caltech101/imagenet", "README.md"), ("bccd/coco", "README.md"),
        ("cifar10_depth8_80/cifar10", "docs/framework.md"),
    ):  # fmt: skip
        arms = json.loads((ROOT / "results" / record / "outcome.json").read_text())
        (arm,) = (arm for arm in arms if arm["arm"] == "example_before_e2")
        yield page, f"{arm['ratio_to_baseline']:.2f} ({arm['ratio_low']:.2f} to {arm['ratio_high']:.2f})"


@pytest.mark.parametrize("said", [_of_wall_time, _of_echoing])
def test_numbers_in_texts_are_those_of_their_records(said: Callable[[], Said]) -> None:
    assert [text for page, text in said() if text not in (ROOT / page).read_text()] == []


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
    """The recorded best value of the run with the seed and the fresh examples of these weights."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = read_rows(WEIGHTS.parent / record / "trials.json")
    (row,) = [row for row in rows if row["arm"] == arm and row["seed"] == summary["seed"]]
    assert row["fresh_examples"] == summary["fresh_examples"]
    return row["best_value"]
