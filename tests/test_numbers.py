"""Figures in the texts, and weights in the repository, are those of the committed records."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adaecho.errors import DataError, FolderError
from adaecho.evaluate import evaluate
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
from scripts import keep_weights
from scripts.keep_weights import WEIGHTS, card

ROOT = Path(__file__).resolve().parent.parent
CLOCK = "experiments/schedule_clock/README.md"
Said = Iterator[tuple[str, str]]
"""Pages, and what their records make them say."""


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_what_the_records_say(name: str) -> None:
    page = (ROOT / "experiments" / name / "README.md").read_text()
    assert with_tables(page, PAGES[name](ROOT / "results")) == page, "make figures writes it anew"


def test_a_table_that_was_edited_is_told_and_makes_no_page(tmp_path: Path) -> None:
    into = tmp_path / "quickstart/digits"
    shutil.copytree(ROOT / "results/quickstart/digits", into)
    text = (into / "outcome.json").read_text()
    (into / "outcome.json").write_text(text.replace("mean", "mean ", 1))
    with pytest.raises(DataError, match=r"outcome\.json: not what origin\.json tells of"):
        PAGES["quickstart"](tmp_path)


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
    assert digests == {name: digest(file.with_name(name).read_bytes()) for name in digests}


def _rounded(value: Any) -> Any:
    """To ten digits: the order of a sum is the interpreter's."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_rounded, value))
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
    assert _rounded(recorded) == _rounded(readings(read_rows(folder / "branches.json")))


def _of_wall_time() -> Said:
    folder = ROOT / "results" / "fig4" / "cifar10"
    assert {(arm["reached"], arm["searches"]) for arm in read_json(folder / "outcome.json")} == {(5, 5)}
    rows = read_rows(folder / "trials.json")
    ratios = sorted(row["R"] for row in rows)
    for text in (
        f"R was {ratios[0]:.1f} to {ratios[-1]:.1f}",
        f"a median of\n{ratios[len(ratios) // 2]:.1f}:",
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


def _of_ends() -> Said:
    """Those that meet the target."""
    met = {
        (row["arm"], row["repeat"]): row["final_accuracy"]
        for row in read_rows(ROOT / "results" / "schedule_clock" / "cifar10" / "trials.json")
        if (row["final_accuracy"] or 0) >= row["target_value"]
    }
    assert set(met) == {("e2_steps_7000", 1), ("e4_steps_10000", 3)}
    yield from ((CLOCK, f"{end:.4f}") for end in met.values())


def _of_the_reading_that_counts() -> Said:
    found, with_ends = cells(ROOT / "results"), cells(ROOT / "results", ends=True)
    of_decays = ratio(found["baseline_7000"], found["baseline_10000"])[0][:4]
    yield CLOCK, f"the baseline needs {of_decays} as much with 7,000 steps as with 10,000"
    tuned_at = {e: ratio(tuned(found, f"e{e}_")[0], tuned(found, "baseline")[0]) for e in (2, 4)}
    yield "README.md", f"takes [{tuned_at[2][0]}](experiments/schedule_clock/README.md)"
    assert tuned_at[4][1] == "not decided"
    at_4 = ratio(tuned(with_ends, "e4_")[0], tuned(with_ends, "baseline")[0])[0]
    yield CLOCK, f"*not decided* by the rule, {at_4[:4]} with the ends of runs counted"
    by_ends = ends.ratio(read_rows(ROOT / "results/schedule_ends/cifar10/trials.json"), 4)
    assert by_ends.verdict == "saves"
    words = f"{by_ends.ratio:.2f} ({by_ends.low:.2f} to {by_ends.high:.2f})"
    yield "README.md", f"(at e = 4 [{words}](experiments/schedule_clock/ends.md) by the ends of decays)"
    alone = [ratio(found[f"e2_fresh_{n}"], found[f"baseline_{n}"])[0][:4] for n in (7000, 10_000)]
    yield "README.md", f"{alone[0]} to {alone[1]} by the repeats alone"


@pytest.mark.parametrize("said", [_of_wall_time, _of_echoing, _of_ends, _of_the_reading_that_counts])
def test_numbers_in_texts_are_those_of_their_records(said: Callable[[], Said]) -> None:
    assert [text for page, text in said() if text not in (ROOT / page).read_text()] == []


KEPT = sorted(path.parent for path in WEIGHTS.glob("*/README.md"))


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_the_card_says_what_the_records_beside_it_say(folder: Path) -> None:
    assert (folder / "README.md").read_text() == card(folder)


@pytest.mark.parametrize("name", ["metrics.jsonl", "model/final.safetensors"])
def test_nothing_is_kept_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In a run from others it may lead to a key of one's own, and what is kept is committed."""
    monkeypatch.setattr(keep_weights, "WEIGHTS", tmp_path / "kept")
    run = tmp_path / "run"
    shutil.copytree(WEIGHTS / "digits", run)
    (run / name).rename(tmp_path / "mine")
    (run / name).symlink_to(tmp_path / "mine")
    with pytest.raises(FolderError, match=f"{name}: leads elsewhere by a symbolic link"):
        keep_weights.keep(run, "digits")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("changed", [{"status": "preempted"}, {"steps": 153}])
def test_weights_of_an_earlier_end_are_not_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(keep_weights, "WEIGHTS", tmp_path / "kept")
    run = shutil.copytree(WEIGHTS / "digits", tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, **changed}))
    with pytest.raises(FolderError, match=r"its weights are those of step 152, and it is \w+ at step 15"):
        keep_weights.keep(run, "digits")
    assert not (tmp_path / "kept").exists()
    evaluate(run)
    assert ("is of an earlier end, at step 152" in capsys.readouterr().err) == ("steps" in changed)


def test_the_card_has_the_figure_of_the_weights_and_not_the_best(tmp_path: Path) -> None:
    run = shutil.copytree(WEIGHTS / "digits", tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    summary["best"] |= {"value": 0.99, "steps": 114}  # reached after a second evaluation in a row
    (run / "summary.json").write_text(json.dumps(summary))
    assert "| validation accuracy | 0.9777777777777777 |" in card(run)


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
