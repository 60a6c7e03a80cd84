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
from experiments.schedule_clock import ends
from experiments.schedule_clock.cells import cells, ratio, tuned

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


def test_the_ends_that_meet_the_target_are_told() -> None:
    page = (ROOT / "experiments" / "schedule_clock" / "README.md").read_text()
    met = {
        (row["arm"], row["repeat"]): row["final_accuracy"]
        for row in read_rows(ROOT / "results" / "schedule_clock" / "cifar10" / "trials.json")
        if (row["final_accuracy"] or 0) >= row["target_value"]
    }
    assert set(met) == {("e2_steps_7000", 1), ("e4_steps_10000", 3)}
    assert all(f"{end:.4f}" in page for end in met.values())


def test_the_texts_tell_the_reading_that_counts() -> None:
    page = (ROOT / "experiments" / "schedule_clock" / "README.md").read_text()
    readme = (ROOT / "README.md").read_text()
    found = cells(ROOT / "results")
    ratio_of_decays = ratio(found["baseline_7000"], found["baseline_10000"])[0][:4]
    tuned_at = {e: ratio(tuned(found, f"e{e}_")[0], tuned(found, "baseline")[0]) for e in (2, 4)}
    alone = [ratio(found[f"e2_fresh_{n}"], found[f"baseline_{n}"])[0][:4] for n in (7000, 10_000)]
    assert f"takes [{tuned_at[2][0]}](experiments/schedule_clock/README.md)" in readme
    assert tuned_at[4][1] == "not decided"
    with_ends = cells(ROOT / "results", ends=True)
    at_4 = ratio(tuned(with_ends, "e4_")[0], tuned(with_ends, "baseline")[0])[0]
    assert f"*not decided* by the rule, {at_4[:4]} with the ends of runs counted" in page
    by_ends = ends.ratio(read_rows(ROOT / "results/schedule_ends/cifar10/trials.json"), 4)
    words = f"{by_ends.ratio:.2f} ({by_ends.low:.2f} to {by_ends.high:.2f})"
    assert by_ends.verdict == "saves"
    assert f"(at e = 4 [{words}](experiments/schedule_clock/ends.md) by the ends of decays)" in readme
    assert f"{alone[0]} to {alone[1]} by the repeats alone" in readme
    assert f"the baseline needs {ratio_of_decays} as much with 7,000 steps as with 10,000" in page
