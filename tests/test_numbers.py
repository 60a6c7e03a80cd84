"""Figures in the texts are those of the committed records."""

import json
import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from adaecho.figures.committed import read_curves, read_table, read_tables
from adaecho.records.files import read_json
from adaecho.records.outcome import best_trials
from adaecho.records.statistics import cost_ratio
from adaecho.records.table import summarize
from adaecho.records.trials import digest, read_rows
from experiments.evidence.claims_page import claims_page
from experiments.evidence.decisions import FRAGILE, Decision, Records, decide, decide_all
from experiments.evidence.predicted_time import section_of_cells
from experiments.evidence.repeat_value import readings

ROOT = Path(__file__).resolve().parent.parent
_ROW = re.compile(
    r"^\| `(\w+)` \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \| (\d+) of (\d+) \|$", re.MULTILINE
)


def test_the_quickstarts_table_is_its_records() -> None:
    outcome = json.loads((ROOT / "results" / "quickstart" / "digits" / "outcome.json").read_text())
    expected = {
        arm["arm"]: (
            f"{arm['fresh_examples']['mean']:,.0f}",
            *(f"{arm[key]:.2f}" for key in ("ratio_to_baseline", "ratio_low", "ratio_high")),
            str(arm["reached"]),
            str(arm["searches"]),
        )
        for arm in outcome
        if arm["arm"] != "baseline"
    }
    assert {
        row[0]: row[1:]
        for row in _ROW.findall((ROOT / "experiments" / "quickstart" / "README.md").read_text())
    } == expected


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


def test_the_table_of_fig5_is_its_records() -> None:
    outcome = json.loads((ROOT / "results" / "fig5" / "digits" / "outcome.json").read_text())
    arms = {arm["arm"]: arm for arm in outcome}
    page = (ROOT / "experiments" / "fig5" / "README.md").read_text()
    for factor in (2, 4, 8, 16):
        cells = [str(factor)]
        for arm in (arms[f"e{factor}"], arms[f"e{factor}_batch128"]):
            cells += [f"{arm['fresh_examples']['mean']:,.0f}", f"{arm['ratio_to_baseline']:.2f}"]
            cells += [f"{arm['ratio_low']:.2f} to {arm['ratio_high']:.2f}"]
        assert f"| {' | '.join(cells)} |" in page


def test_the_table_of_fig5_on_text_is_its_records() -> None:
    arms = json.loads((ROOT / "results" / "fig5" / "small_text" / "outcome.json").read_text())
    page = (ROOT / "experiments" / "fig5" / "README.md").read_text()
    for arm in arms:
        ratio = ["1", ""] if arm["echo_factor"] == 1 else _cells(arm)
        cells = [f"{arm['fresh_examples']['mean']:,.0f}", *ratio, f"{arm['steps']['mean']:.0f}"]
        assert f"| {' | '.join([str(arm['echo_factor']), *cells])} |" in page


def _arms(experiment: str) -> dict[str, dict[str, Any]]:
    found = json.loads((ROOT / "results" / experiment / "digits" / "outcome.json").read_text())
    return {arm["arm"]: arm for arm in found}


def _cells(arm: dict[str, Any]) -> list[str]:
    return [f"{arm['ratio_to_baseline']:.2f}", f"{arm['ratio_low']:.2f} to {arm['ratio_high']:.2f}"]


def test_the_table_of_fig6_is_its_records() -> None:
    arms, page = _arms("fig6"), (ROOT / "experiments" / "fig6" / "README.md").read_text()
    for size in (16, 32, 64, 128):
        echoed = [
            "{} ({})".format(*_cells(arms[f"{arm}_e2_batch{size}"]))
            for arm in ("batch", "example_after", "example_before")
        ]
        baseline = f"{arms[f'baseline_batch{size}']['fresh_examples']['mean']:,.0f}"
        assert f"| {' | '.join([str(size), baseline, *echoed])} |" in page


def test_the_tables_of_fig7_are_their_records() -> None:
    page = (ROOT / "experiments" / "fig7" / "README.md").read_text()
    of_batches, of_examples = _arms("fig7a"), _arms("fig7b")
    for size in (0, 4, 8, 16):
        arm = of_batches[f"batch_e2_buffer{size}"]
        cells = [str(size), f"{arm['fresh_examples']['mean']:,.0f}", *_cells(arm)]
        assert f"| {' | '.join(cells)} |" in page
    for size in (64, 256, 1024):
        pair = [of_examples[f"{arm}_buffer{size}"] for arm in ("baseline", "example_after_e2")]
        means = [f"{arm['fresh_examples']['mean']:,.0f}" for arm in pair]
        assert f"| {' | '.join([f'{size:,}', *means, *_cells(pair[1])])} |" in page


@pytest.mark.parametrize("record", ["controls/digits", "controls_cifar10/cifar10"])
def test_the_tables_of_controls_are_their_records(record: str) -> None:
    best: dict[str, list[float]] = {}
    for row in best_trials(read_rows(ROOT / "results" / record / "trials.json")).values():
        best.setdefault(row["arm"], []).append(row["best_value"])
    page = (ROOT / "experiments" / "controls" / "README.md").read_text()
    for factor in (2, 4):
        cells = [str(factor)]
        for other in (f"once_e{factor}", f"spaced_e{factor}", "new"):
            ratio = cost_ratio(best[f"echoed_e{factor}"], best[other])
            cells.append(f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
        assert f"| {' | '.join(cells)} |" in page


def test_the_winners_table_is_their_records() -> None:
    page = (ROOT / "experiments" / "fig3" / "README.md").read_text()
    rows = read_rows(ROOT / "results" / "fig3_winners" / "digits" / "trials.json")
    for arm, chosen in _arms("fig3").items():
        seeds: dict[str, list[int]] = {}
        for row in rows:
            if row["arm"].startswith(f"{arm}_search"):
                cost = row["to_target_fresh_examples"] or row["fresh_examples"]
                seeds.setdefault(row["arm"], []).append(cost)
        assert [len(costs) for costs in seeds.values()] == [24] * 5
        costs = [geometric_mean(of_winner) for of_winner in seeds.values()]
        mean, low, high = geometric_mean(costs), min(costs), max(costs)
        best = chosen["fresh_examples"]["mean"]
        assert f"| {best:,.0f} | {mean:,.0f} ({low:,.0f} to {high:,.0f}) | {mean / best:.1f} |" in page


def test_the_table_of_wall_time_is_its_records() -> None:
    folder = ROOT / "results" / "fig4" / "cifar10"
    arms = json.loads((folder / "outcome.json").read_text())
    page = (ROOT / "experiments" / "fig4" / "README.md").read_text()
    fresh, seconds = ([arm[key]["mean"] for arm in arms] for key in ("fresh_examples", "train_time_s"))
    for arm, one, time_s in zip(arms, fresh, seconds, strict=True):
        e, of_fresh, of_time = arm["echo_factor"], one / fresh[0], time_s / seconds[0]
        assert arm["reached"] == arm["searches"] == 5
        assert (
            f"| {e} | {one:,.0f} | {of_fresh:.2f} | {1 / e:.2f} | {time_s:.1f} | {of_time:.2f} | "
            f"{of_time / of_fresh:.3f} |"
        ) in page
    rows = read_rows(folder / "trials.json")
    ratios = [row["R"] for row in rows]
    assert f"R was {min(ratios):.1f} to {max(ratios):.1f}" in page
    assert f"a median of\n{sorted(ratios)[len(ratios) // 2]:.1f}:" in page
    assert f"{sum(row['train_time_s'] for row in rows):.0f} s of training" in page


@pytest.mark.parametrize(
    ("record", "experiment"),
    [
        ("cifar10_depth8/cifar10", "cifar10_depth8"),
        ("cifar10_depth8_80/cifar10", "cifar10_depth8"),
        ("quickstart_boxes/scenes", "bccd"),
        ("caltech101/imagenet", "caltech101"),
        ("bccd/coco", "bccd"),
    ],
)
def test_a_table_with_intervals_is_its_records(record: str, experiment: str) -> None:
    arms = json.loads((ROOT / "results" / record / "outcome.json").read_text())
    page = (ROOT / "experiments" / experiment / "README.md").read_text()
    for arm in arms:
        low, high = arm["ratio_low"], arm["ratio_high"]
        interval = "-" if low is None else f"{low:.2f} to {high:.2f}"
        assert (
            f"| `{arm['arm']}` | {arm['fresh_examples']['mean']:,.0f} | {arm['ratio_to_baseline']:.2f} | "
            f"{interval} | {arm['steps']['mean']:,.0f} | {arm['reached']} of {arm['searches']} |"
        ) in page


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


def test_the_table_of_average_precisions_is_its_records() -> None:
    curves = json.loads((ROOT / "results" / "bccd" / "coco" / "curves.json").read_text())
    page = (ROOT / "experiments" / "bccd" / "README.md").read_text()
    for arm in ("baseline", "example_before_e2"):
        ends = [curve["last"] for curve in curves if curve["arm"] == arm]
        assert len(ends) == 3
        keys = ("mAP_50", "AP_50/RBC", "AP_50/WBC", "AP_50/Platelets", "mAP")
        means = [f"{sum(end[key] for end in ends) / 3:.2f}" for key in keys]
        assert f"| {' | '.join([f'`{arm}`', *means])} |" in page


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


def test_the_verdicts_of_two_evaluations_in_a_row_are_their_records() -> None:
    def verdicts(fig3: str) -> dict[str, Decision]:
        tables = {name: ROOT / "results" / name / "cifar10" / "trials.json" for name in (fig3, "fig4")}
        rows = {name[:4]: read_table(table) for name, table in tables.items()}
        curves = {name[:4]: read_curves(table, rows[name[:4]]) for name, table in tables.items()}
        found = decide(Records(rows, curves), "cifar10")
        return {one.claim.key: one for one in found if one.claim.experiment == "fig3"}

    page = (ROOT / "experiments" / "fig3" / "README.md").read_text().split("### Two evaluations")[1]
    first, again = verdicts("fig3"), verdicts("fig3_in_a_row")
    for key, one in again.items():
        assert one.effect is not None
        ratio = f"{one.effect.value:.2f} | {one.effect.low:.2f} to {one.effect.high:.2f} | {one.p:.2g}"
        words = one.verdict, first[key].verdict
        both = one.verdict if len({*words}) == 1 else FRAGILE
        assert f"| {ratio} | {' | '.join([*words, both])} |" in page


def test_the_tables_of_predicted_time_are_their_record() -> None:
    record = read_json(ROOT / "results" / "predicted_time" / "paced" / "cells.json")
    page = (ROOT / "experiments" / "predicted_time" / "README.md").read_text()
    cells = {(row["task"], row["R"], row["e"]): row for row in record["rows"]}
    for task in ("cifar10", "digits"):
        for ratio in (1.3, 2.0, 4.0):
            rows = [cells[task, ratio, e] for e in (1, 2, 4)]
            shown = [f"{row['measured_s']:.1f} s, {row['measured_over_predicted']:.2f}" for row in rows]
            faster = [
                ", ".join(f"{rows[0][key] / row[key]:.2f}" for row in rows[1:])
                for key in ("predicted_s", "measured_s")
            ]
            assert f"| {ratio:g} | {' | '.join([*shown, *faster])} |" in page
    section = section_of_cells("", record, "")
    assert "digits: does not hold, 7 of 9 cells" in section
    assert "cifar10: holds, 9 of 9 cells" in section


@pytest.mark.parametrize("experiment", ["resnet32", "resnet32_14k", "resnet32_others"])
def test_the_page_of_resnet32_tells_what_its_records_hold(experiment: str) -> None:
    results = ROOT / "results" / experiment / "cifar10"
    page = (ROOT / "experiments" / "resnet32" / "README.md").read_text()
    of_test = json.loads((results / "test.json").read_text())
    for row in read_rows(results / "trials.json"):
        reached = "missed" if row["to_target_fresh_examples"] is None else "reached"
        end = "-" if row["final_accuracy"] is None else f"{row['final_accuracy']:.4f}"
        cells = f"{row['steps']:,} | {row['fresh_examples']:,} | {row['best_value']:.4f} | {reached} | {end}"
        assert f"| `{row['arm']}` | {cells} | {of_test[row['arm']]['accuracy']:.4f} |" in page


def test_the_outcome_of_repeat_value_is_what_its_branches_say() -> None:
    folder = ROOT / "results" / "repeat_value" / "digits"
    recorded = json.loads((folder / "outcome.json").read_text())
    again = readings(read_rows(folder / "branches.json"))
    assert list(map(_rounded, recorded)) == list(map(_rounded, again))
