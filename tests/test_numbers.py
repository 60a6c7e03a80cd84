"""Figures in the texts are those of the committed records."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from adaecho.figures.committed import read_tables
from adaecho.records.files import read_json
from adaecho.records.table import summarize
from adaecho.records.trials import digest, read_rows
from experiments.evidence.claims_page import claims_page
from experiments.evidence.decisions import decide_all
from experiments.evidence.pages import PAGES, with_tables
from experiments.evidence.predicted_time import section_of_cells
from experiments.evidence.repeat_value import readings

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_what_the_records_say(name: str) -> None:
    page = (ROOT / "experiments" / name / "README.md").read_text()
    assert with_tables(page, PAGES[name](ROOT / "results")) == page, "make figures writes it anew"


def test_a_table_without_a_place_on_its_page_is_told_and_numbers_are_put_right() -> None:
    page = "| a | 1 | 2 |\n\n| a | 3 |\n| b | 4 |\n"
    assert with_tables(page, [[["a", "5"], ["b", "6"]]]) == "| a | 1 | 2 |\n\n| a | 5 |\n| b | 6 |\n"
    with pytest.raises(LookupError, match="no place for the table that begins with c"):
        with_tables(page, [[["c", "5"]]])


def test_the_page_of_claims_is_what_the_records_say() -> None:
    tables = read_tables(ROOT / "results")
    decided = decide_all(tables)
    page = claims_page(decided, {name: rows for name, (rows, _) in tables.items()}, ROOT / "results")
    assert (ROOT / "docs" / "claims.md").read_text() == page, "make figures writes it anew"


def test_every_decided_verdict_has_the_one_of_the_rule_before_beside_it() -> None:
    earlier = json.loads((ROOT / "results" / "earlier_verdicts.json").read_text())["verdicts"]
    found = {
        (one.claim.key, one.task, one.claim.experiment)
        for one in decide_all(read_tables(ROOT / "results"))
        if one.effect
    }
    measured_since = {"fig8_early"}  # with the rule of today
    assert {one[:2] for one in found if one[2] not in measured_since} == {
        (one["claim"], one["task"]) for one in earlier
    }


def test_the_numbers_beside_the_table_of_wall_time_are_its_records() -> None:
    folder = ROOT / "results" / "fig4" / "cifar10"
    page = (ROOT / "experiments" / "fig4" / "README.md").read_text()
    assert {(arm["reached"], arm["searches"]) for arm in read_json(folder / "outcome.json")} == {(5, 5)}
    rows = read_rows(folder / "trials.json")
    ratios = [row["R"] for row in rows]
    assert f"R was {min(ratios):.1f} to {max(ratios):.1f}" in page
    assert f"a median of\n{sorted(ratios)[len(ratios) // 2]:.1f}:" in page
    assert f"{sum(row['train_time_s'] for row in rows):.0f} s of training" in page


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("caltech101/imagenet", "README.md"),
        ("bccd/coco", "README.md"),
        ("cifar10_depth8_80/cifar10", "docs/framework.md"),
    ],
)
def test_ratios_of_echoing_in_texts_are_their_records(record: str, text: str) -> None:
    (arm,) = (
        arm
        for arm in json.loads((ROOT / "results" / record / "outcome.json").read_text())
        if arm["arm"] == "example_before_e2"
    )
    ratio = f"{arm['ratio_to_baseline']:.2f} ({arm['ratio_low']:.2f} to {arm['ratio_high']:.2f})"
    assert ratio in (ROOT / text).read_text()


@pytest.mark.parametrize(("experiment", "first"), [("quickstart_text", 0), ("text_imdb", 3)])
def test_the_tables_of_text_are_their_records(experiment: str, first: int) -> None:
    trials = read_rows(ROOT / "results" / experiment / "small_text" / "trials.json")
    page = (ROOT / "experiments" / "quickstart_text" / "README.md").read_text()
    table = [re.findall(r"[\d.,]+", row) for row in page.splitlines() if re.match(r"\| (?!arm)[a-z]", row)]
    means: dict[str, list[float]] = {}
    for arm in ("baseline", "batch_e2", "example_e2"):
        own = [trial for trial in trials if trial["arm"] == arm]
        keys = ("to_target_fresh_examples", "to_target_steps", "train_time_s")
        means[arm] = [sum(trial[key] for trial in own) / len(own) for key in keys]
    for row, (fresh, steps, seconds) in zip(table[first : first + 3], means.values(), strict=True):
        ratio = fresh / means["baseline"][0]
        assert {f"{fresh:,.0f}", f"{ratio:.2f}", f"{steps:.0f}"} <= set(row)
        assert experiment == "text_imdb" or f"{seconds:.0f}" in row


@pytest.mark.parametrize(
    "table", sorted((ROOT / "results").glob("*/*/trials.json")), ids=lambda path: path.parts[-3]
)
def test_every_outcome_is_what_its_trials_say(table: Path) -> None:
    recorded = json.loads(table.with_name("outcome.json").read_text())
    for arm, again in zip(recorded, summarize(read_rows(table)), strict=True):
        assert _rounded(arm) == _rounded(again)


@pytest.mark.parametrize(
    "origin", sorted((ROOT / "results").glob("*/*/origin.json")), ids=lambda path: path.parts[-3]
)
def test_every_record_has_the_digests_of_its_tables(origin: Path) -> None:
    digests = json.loads(origin.read_text())["sha256"]
    assert digests
    assert digests == {name: digest(origin.with_name(name).read_bytes()) for name in digests}


def _rounded(value: Any) -> Any:
    """To ten digits: the order of a sum is the interpreter's."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.10g}") if isinstance(value, float) else value


def test_the_winners_ratios_on_the_page_of_fig3_are_those_on_the_page_of_claims() -> None:
    page = (ROOT / "experiments" / "fig3" / "README.md").read_text()
    winners = page.split("## The winners on new seeds")[1].split("## Measured on CIFAR-10")[0]
    ratios = re.findall(r"(\d\.\d\d) \((\d\.\d\d to \d\.\d\d)[;)]", winners)
    assert len(ratios) == 9  # the first rule's four, the third one's five
    claims = (ROOT / "docs" / "claims.md").read_text()
    assert [ratio for ratio in ratios if "{} ({})".format(*ratio) not in claims] == []


def test_the_verdicts_on_predicted_time_are_their_record() -> None:
    record = read_json(ROOT / "results" / "predicted_time" / "paced" / "cells.json")
    section = section_of_cells("", record, "")
    assert "digits: does not hold, 7 of 9 cells" in section
    assert "cifar10: holds, 9 of 9 cells" in section


def test_the_outcome_of_repeat_value_is_what_its_branches_say() -> None:
    folder = ROOT / "results" / "repeat_value" / "digits"
    recorded = json.loads((folder / "outcome.json").read_text())
    again = readings(read_rows(folder / "branches.json"))
    assert list(map(_rounded, recorded)) == list(map(_rounded, again))
