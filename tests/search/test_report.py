"""The lines and the table that a sweep prints."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from adaecho.figures.report import unfinished_note
from adaecho.records.files import write_json
from adaecho.records.table import end_of_sweep, summarize, terminal_table
from adaecho.search import report
from adaecho.search.__main__ import main
from adaecho.search.design import Design, trial_seed
from adaecho.search.report import (
    Progress,
    edge_warnings,
    remarks,
    trial_rows,
    unfinished,
    write_outcome,
)
from adaecho.search.state import SweepState
from adaecho.search.sweeper import next_steps
from tests.conftest import Refused
from tests.search.conftest import Command


def _summary(status: str, fresh_examples: int | None = None) -> dict[str, Any]:
    cost = {"fresh_examples": fresh_examples, "steps": 10, "train_time_s": 1.25}
    end = {"fresh_examples": 40_000, "steps": 100, "train_time_s": 9.0}
    return {"status": status, "seed": 1, "to_target": cost if fresh_examples else None, "best": None, **end}


@pytest.fixture
def state(design: Design, tmp_path: Path) -> SweepState:
    """Two arms, one search each: the baseline is complete, the other has a failed and a missed trial."""
    state = SweepState(replace(design, repeats=1), tmp_path)
    first, second = design.arms
    state.searches[first.name, 0].summaries = {
        0: _summary("reached", 8_000),
        1: _summary("diverged"),
        2: _summary("reached", 4_000),
        3: _summary("reached", 6_000),
        4: _summary("reached", 100),  # beyond the budget: recorded, not counted
    }
    failed_and_missed = {1: _summary("failed"), 2: _summary("budget_spent")}
    state.searches[second.name, 0].summaries = {0: _summary("reached", 3_000), **failed_and_missed}
    return state


def printed(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The words of each line of the table at the end of a sweep."""
    console = Console(file=io.StringIO(), width=80, no_color=True)
    console.print(terminal_table(end_of_sweep(rows, summarize(rows))))
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_the_outcome_is_of_what_the_folders_say_when_it_is_written(
    design: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SweepState(replace(design, repeats=1), tmp_path)
    for trial in state.missing():
        (tmp_path / str(trial)).mkdir(parents=True)
        seed = trial_seed(design.seed, trial.repeat, trial.index)
        write_json((tmp_path / str(trial)) / "summary.json", {**_summary("reached", 8_000), "seed": seed})
    assert state.searches[design.arms[0].name, 0].summaries == {}
    monkeypatch.setattr(report, "draw", lambda *_: [])
    write_outcome(state)
    assert len(json.loads((tmp_path / "trials.json").read_text())) == 6
    assert unfinished(state) == []


def test_a_sweep_without_a_target_that_diverged_ends_without_a_figure(tmp_path: Path) -> None:
    ended = _own("none", 0.5)
    diverged = {**ended, "status": "diverged", "experiment": "sweep", "task": "digits"}
    assert report.draw(tmp_path, [diverged]) == []


def test_rows_count_the_first_non_divergent_trials(state: SweepState) -> None:
    rows, design = trial_rows(state), state.design
    assert [row["index"] for row in rows if row["arm"] == "echo-none"] == [0, 1, 2, 3, 4]
    assert [row["index"] for row in rows if row["arm"] == "echo-none" and row["counted"]] == [0, 2, 3]
    assert [row["to_target_fresh_examples"] for row in rows[1:3]] == [None, 4_000]
    assert rows[3]["hyperparameters"] == design.point(design.arms[0], 0, 3)
    assert rows[3]["seed"] == trial_seed(design.seed, 0, 3)


def test_the_table_of_an_outcome_fits_80_columns(
    state: SweepState,
) -> None:
    lines = printed(trial_rows(state))
    assert lines[2] == ["echo-none", "4,000", "4,000-8,000", "1.00", "10", "1.2", "1", "-"]
    assert lines[3] == ["echo-batch", "3,000", "3,000-3,000", "0.75", "10", "1.2", "-", "1"]


def test_many_metrics_leave_the_arms_their_names() -> None:
    metrics = ("mAP", "mAP_50", "mAP_75", "mAP_small", "mAP_medium", "mAP_large")
    row = _own("example_before_augmentation_e2", 0.5, echo_variant="none", target_metric="mAP_50")
    row |= {f"final_{name}": 0.5 for name in metrics}
    del row["final_accuracy"], row["final_cross_entropy"], row["validation_images"]
    text = "_".join(word for line in printed([row]) for word in line)
    assert "example_before" in text
    assert "mAP_large" not in text


def test_an_incomplete_search_says_so(state: SweepState) -> None:
    (line,) = remarks(state)
    assert line.startswith("search echo-batch/0 is incomplete: 1 trial failed; ")
    traceback = state.folder / "echo-batch/0/1/traceback.txt"
    traceback.parent.mkdir(parents=True, exist_ok=True)
    traceback.write_text("")
    (line,) = remarks(state)
    assert line.endswith(f"see {traceback}")
    assert unfinished(state) == []
    search = state.searches["echo-none", 0]
    search.summaries = {}
    says = "incomplete: 3 trials left; run the same -m command to continue"
    assert unfinished(state) == [says]
    search.summaries = {0: _summary("budget_spent")}
    assert [row.get("trials_left") for row in trial_rows(state)] == [2, 1, 1, 1]
    says = "Incomplete, with trials that had not ended: searches echo-none/0, echo-batch/0."
    assert unfinished_note(trial_rows(state)) == says
    search.summaries = {index: _summary("diverged") for index in range(9)}
    says = "9 trials diverged, more than search.max_diverged=6"
    assert any(says in line for line in remarks(state))
    # Without axes one run that diverged is an outcome.
    search.arm = replace(search.arm, axes=())
    search.trials, search.max_diverged, search.summaries = 1, 0, {0: _summary("diverged")}
    assert not any("echo-none" in line for line in remarks(state))


def test_trials_of_an_arm_with_different_files_are_remarked(state: SweepState) -> None:
    (first, _), (second, _) = state.searches
    for number, summary in state.searches[first, 0].summaries.items():
        summary["data"] = {"files_sha256": "ab" if number < 2 else "cd"}
    for summary in state.searches[second, 0].summaries.values():
        summary["data"] = {"files_sha256": "ef"}
    (changed,) = [line for line in remarks(state) if "files_sha256" in line]
    assert changed.startswith(f"arm {first}: the files of the data changed between trials")


def test_a_best_point_near_the_end_of_an_axis_is_a_warning(state: SweepState) -> None:
    rows = trial_rows(state)
    for row in rows:
        assert set(row["positions"]) == set(row["hyperparameters"])
        row["positions"] = {"optimizer.learning_rate": 0.5, "optimizer.momentum": 0.06}
    assert edge_warnings(state.design, summarize(rows)) == []
    best = next(row for row in rows if row["to_target_fresh_examples"] == 3_000)
    best["positions"]["optimizer.learning_rate"] = 0.96
    (line,) = edge_warnings(state.design, summarize(rows))
    assert line.startswith("warning: echo-batch: in 1 of 1 searches the best optimizer.learning_rate")


def test_status_and_collect_read_folders_alone(
    run_sweep: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("search.trials=2", "optimizer.learning_rate=interval(0.05,0.25)")
    folder = run_sweep(*overrides)
    outcome_before = (folder / "outcome.json").read_text()
    (folder / "outcome.json").unlink()
    (folder / "none/0/1/summary.json").unlink()
    capsys.readouterr()
    main(["status", str(folder)])
    printed = capsys.readouterr().out
    assert printed.startswith(f"{folder}: 1 arm, 2 trials, 1 to run")
    assert "incomplete: 1 trial left" in printed
    assert not (folder / "outcome.json").exists()
    main(["collect", str(folder)])
    assert json.loads((folder / "outcome.json").read_text())[0]["trials"] == 1
    run_sweep(*overrides)
    assert (folder / "outcome.json").read_text() == outcome_before


@pytest.mark.parametrize("command", ["status", "collect"])
def test_a_folder_without_a_sweep_is_refused(command: str, tmp_path: Path, refused: Refused) -> None:
    assert f"{tmp_path}: not the folder of a sweep (no design.json)" in refused(main, command, tmp_path)


def test_without_a_target_the_table_says_where_the_runs_ended() -> None:
    rows = [_own("a", value, echo_variant="none", repeat=repeat) for repeat, value in enumerate((0.5, 0.75))]
    for row in rows:
        del row["final_cross_entropy"], row["validation_images"]
    assert printed(rows)[-1] == ["a", "0.6250", "3,200", "100", "6,400", "2"]  # no gain, and none diverged


def _own(arm: str, value: float, **changes: Any) -> dict[str, Any]:
    """A row of a run on 20 held-out images."""
    counts = {"fresh_examples": 3200, "steps": 100, "trained_examples": 6400, "train_time_s": 1.0}
    row = {"arm": arm, "echo_variant": arm, "echo_factor": 1, "status": "budget_spent", "counted": True}
    ends = {"final_accuracy": value, "final_cross_entropy": 1.23456, "best_value": value, **counts}
    target = {"target_metric": "accuracy", "target_value": None, "to_target_fresh_examples": None}
    return {**row, **ends, **target, "repeat": 0, "index": 0, "validation_images": 20, **changes}


def test_the_table_without_a_target_shows_metrics_at_the_end() -> None:
    rows = [_own("none", 0.55), _own("batch", 0.6)]
    columns = end_of_sweep(rows, summarize(rows))
    shown = {column.heading: column.cells for column in columns}
    assert (shown["accuracy"], shown["cross entropy"]) == (["0.5500", "0.6000"], ["1.2346", "1.2346"])
    assert not [column.heading for column in columns if set(column.cells) == {"-"}]
    assert "mean gain" not in shown


def test_a_sweep_that_missed_its_target_everywhere_says_what_to_raise() -> None:
    goal = {"target_value": 0.9}
    rows = [_own("none", 0.55, **goal), _own("batch", 0.6, **goal)]
    (line,) = report.missed(rows)
    assert line.startswith("missed: no evaluation met the target, accuracy 0.9 (best value: 0.6); raise")
    assert "; all trials diverged: lower" in report.missed([row | {"status": "diverged"} for row in rows])[0]
    assert report.missed([_own("free", 0.7, target_value=None), *rows]) == [line], "that one had no target"
    met = _own("none", 0.95, **goal) | {"to_target_fresh_examples": 320}
    assert not report.missed([*rows, met])


def test_the_printed_command_is_the_typed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", "-m", "--config-dir", "conf", "experiment=mine"])
    config = OmegaConf.create({"tracking": {"kind": "none"}})
    (line,) = next_steps(config, Path("runs/mine"))
    assert line.endswith(
        "collect runs/mine --command 'python -m adaecho.run -m --config-dir conf experiment=mine'"
    )


def test_each_ended_trial_is_a_line(state: SweepState, capsys: pytest.CaptureFixture[str]) -> None:
    new = SweepState(state.design, state.folder)
    progress = Progress(new)
    new.searches = state.searches
    best = {"metric": "accuracy", "value": 0.93}
    new.searches["echo-batch", 0].summaries[2]["best"] = best
    assert progress() == progress() == 7
    lines = [line.partition("; ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "1/7  echo-none/0/0: reached after 8,000 fresh examples",
        "2/7  echo-batch/0/0: reached after 3,000 fresh examples",
        "3/7  echo-none/0/1: diverged",
        "3/7  echo-batch/0/1: failed (no message)",
        "4/7  echo-none/0/2: reached after 4,000 fresh examples",
        "5/7  echo-batch/0/2: budget_spent, best accuracy 0.93",
        "6/7  echo-none/0/3: reached after 6,000 fresh examples",
    ]
