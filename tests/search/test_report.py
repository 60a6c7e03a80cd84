"""What a sweep shows while it runs and at its end, on a narrow terminal without colour and in a log."""

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
from adaecho.records.table import NARROW, Column, decimals_of, end_of_sweep, summarize, terminal_table
from adaecho.search import report
from adaecho.search.__main__ import main
from adaecho.search.design import Design, trial_seed
from adaecho.search.report import (
    Progress,
    caption,
    edge_warnings,
    headline,
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


def printed(rows: list[dict[str, Any]], width: int = 80) -> list[list[str]]:
    """The words of each line of the table at the end of a sweep."""
    return [line.split() for line in on_terminal(end_of_sweep(rows, summarize(rows)), width)]


def on_terminal(columns: list[Column], width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(terminal_table(columns, console.width))
    return console.file.getvalue().splitlines()


def test_the_outcome_is_of_what_the_folders_say_when_it_is_written(
    design: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SweepState(replace(design, repeats=1), tmp_path)
    for trial in state.missing():
        state.trial_folder(trial).mkdir(parents=True)
        seed = trial_seed(design.seed, trial.repeat, trial.index)
        write_json(state.trial_folder(trial) / "summary.json", {**_summary("reached", 8_000), "seed": seed})
    assert state.searches[design.arms[0].name, 0].summaries == {}
    monkeypatch.setattr(report, "draw", lambda *_: [])
    write_outcome(state, Console(file=io.StringIO()))
    assert len(json.loads((tmp_path / "trials.json").read_text())) == 6
    assert unfinished(state) == []


def test_a_sweep_without_a_target_that_diverged_ends_without_a_figure(tmp_path: Path) -> None:
    ended = _own("none", 0.5)
    diverged = {**ended, "status": "diverged", "experiment": "sweep", "task": "digits"}
    assert report.draw(tmp_path, [diverged], summarize([diverged])) == []


def test_rows_count_the_first_non_divergent_trials(state: SweepState) -> None:
    rows, design = trial_rows(state), state.design
    assert [row["index"] for row in rows if row["arm"] == "echo-none"] == [0, 1, 2, 3, 4]
    assert [row["index"] for row in rows if row["arm"] == "echo-none" and row["counted"]] == [0, 2, 3]
    assert [row["to_target_fresh_examples"] for row in rows[1:3]] == [None, 4_000]
    assert rows[3]["hyperparameters"] == design.point(design.arms[0], 0, 3)
    assert rows[3]["seed"] == trial_seed(design.seed, 0, 3)


def test_the_table_of_an_outcome_fits_80_columns_and_a_narrow_one_keeps_the_main_figures(
    state: SweepState,
) -> None:
    lines = printed(trial_rows(state))
    assert lines[2] == ["echo-none", "4,000", "4,000-8,000", "1.00", "10", "1.2", "1", "-"]
    assert lines[3] == ["echo-batch", "3,000", "3,000-3,000", "0.75", "10", "1.2", "-", "1"]
    for width in (40, 60):
        assert printed(trial_rows(state), width)[2] == ["echo-none", "4,000", "1.00", "-"]


def test_many_metrics_leave_the_arms_their_names() -> None:
    metrics = ("mAP", "mAP_50", "mAP_75", "mAP_small", "mAP_medium", "mAP_large")
    row = _own("example_before_augmentation_e2", 0.5, echo_variant="none", target_metric="mAP_50")
    row |= {f"final_{name}": 0.5 for name in metrics}
    del row["final_accuracy"], row["final_cross_entropy"], row["validation_images"]
    text = "_".join(word for line in printed([row]) for word in line)
    assert "example_before" in text
    assert "mAP_large" not in text


def test_a_heading_has_two_lines_and_a_number_stays_beside_its_unit() -> None:
    columns = [Column("arm", ["a"], NARROW), Column("95 % interval", ["0.50 to 0.60"], NARROW)]
    first, second, _ = on_terminal(columns)
    assert first.split() == ["95", "%"]
    assert second.split() == ["arm", "interval"]


@pytest.mark.parametrize(
    ("costs", "over", "more"),
    [
        ((4_000, 4_500, 4_200), "3 runs", ", with 95 % interval"),
        ((4_000, None, 4_200), "those that reached it of 3 runs", "; < and > are bounds"),
    ],
)
def test_the_caption_says_of_which_searches_the_means_are(
    design: Design, tmp_path: Path, costs: tuple[int | None, ...], over: str, more: str
) -> None:
    state = SweepState(replace(design, repeats=3, trials=1), tmp_path)
    for arm, of_arm in zip(design.arms, [(9_000, 8_000, 8_500), costs], strict=True):
        for repeat, cost in enumerate(of_arm):
            summary = _summary("reached" if cost else "budget_spent", cost)
            state.searches[arm.name, repeat].summaries = {0: summary}
    rows = trial_rows(state)
    ratio = "ratio: geometric means of fresh examples, arm / baseline"
    says = f"To the target: mean over {over} of each arm; {ratio}{more}."
    assert caption(state, rows, summarize(rows)) == says
    alone = [row for row in rows if row["arm"] == design.arms[1].name]
    assert "ratio" not in caption(state, alone, summarize(alone))
    to_the_end = [{**row, "target_value": None} for row in rows]
    arms = [{"arm": arm.name} for arm in design.arms]  # which have no ratios
    assert caption(state, to_the_end, arms).startswith("At the end of the budgets: mean over the runs of")


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
    says = "incomplete: 3 of 6 trials have not ended; run the same -m command to continue"
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
    told = capsys.readouterr().out
    assert told.startswith(f"{folder}: 1 arm, 2 trials, 1 to run")
    assert "incomplete: 1 of 2 trials have not ended" in told
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


def test_the_printed_collect_command_finds_the_same_configs_again() -> None:
    theirs = {"path": "/somewhere/conf", "schema": "file", "provider": "main"}
    mine = {"path": str(Path.cwd() / "conf"), "schema": "file", "provider": "command-line"}
    typed = {"hydra": ["hydra.sweep.dir=runs/mine", "hydra.mode=MULTIRUN"]}
    hydra = {"overrides": typed, "runtime": {"config_sources": [theirs, mine]}}
    config = OmegaConf.create({"tracking": {"kind": "none", "mode": "offline"}, "hydra": hydra})
    (line,) = next_steps(config, Path("runs/mine"), ["experiment=mine"])
    assert line.endswith(
        "collect runs/mine --command 'python -m adaecho.run --config-dir conf -m experiment=mine "
        "hydra.sweep.dir=runs/mine'"
    )
    config.hydra.overrides.hydra = ["hydra.mode=MULTIRUN"]
    del config.hydra.runtime.config_sources[1]
    (line,) = next_steps(config, Path("runs/mine"), ["experiment=mine"])
    assert line.endswith("--command 'python -m adaecho.run -m experiment=mine'")


def _own(arm: str, value: float, **changes: Any) -> dict[str, Any]:
    """A row of a run on 20 held-out images."""
    counts = {"fresh_examples": 3200, "steps": 100, "trained_examples": 6400, "train_time_s": 1.0}
    row = {"arm": arm, "echo_variant": arm, "echo_factor": 1, "status": "budget_spent", "counted": True}
    ends = {"final_accuracy": value, "final_cross_entropy": 1.23456, "best_value": value, **counts}
    target = {"target_metric": "accuracy", "target_value": None, "to_target_fresh_examples": None}
    return {**row, **ends, **target, "repeat": 0, "index": 0, "validation_images": 20, **changes}


def test_the_table_of_own_data_says_no_more_than_its_images_carry() -> None:
    rows = [_own("none", 0.55), _own("batch", 0.6)]
    columns = end_of_sweep(rows, summarize(rows))
    shown = {column.heading: column.cells for column in columns}
    assert (shown["accuracy"], shown["cross entropy"]) == (["0.55", "0.60"], ["1.23", "1.23"])
    assert not [column.heading for column in columns if set(column.cells) == {"-"}]
    assert "mean gain" not in shown
    assert [decimals_of(number) for number in (1, 10, 20, 142, 10_000, 10**6, None)] == [1, 1, 2, 3, 4, 4, 4]


def test_a_sweep_that_missed_its_target_everywhere_says_what_to_raise(state: SweepState) -> None:
    goal = {"target_value": 0.9}
    rows = [_own("none", 0.55, **goal), _own("batch", 0.6, **goal)]
    (line,) = report.missed(rows, state)
    assert line.startswith("missed: no evaluation met the target, accuracy 0.9, within max_fresh_examples=")
    assert "(best value: 0.6); raise max_fresh_examples, or set a target.value that was met" in line
    assert (
        "; all trials diverged: lower"
        in report.missed([row | {"status": "diverged"} for row in rows], state)[0]
    )
    assert report.missed([_own("free", 0.7, target_value=None), *rows], state) == [line], (
        "that one had no target"
    )
    met = _own("none", 0.95, **goal) | {"to_target_fresh_examples": 320}
    assert not report.missed([*rows, met], state)


NAME = "example_before_augmentation_e4"


def _state(design: Design, folder: Path) -> SweepState:
    first, second = design.arms
    arms = (replace(first, name="baseline"), replace(second, name=NAME))
    state = SweepState(replace(design, arms=arms), folder)
    reached = {"status": "reached", "to_target": {"fresh_examples": 12_480}}
    state.searches["baseline", 0].summaries = {0: reached, 1: {"status": "diverged"}}
    best = {"metric": "accuracy", "value": 0.93}
    missed = {"status": "budget_spent", "target": {"value": 0.97}, "best": best}
    state.searches[NAME, 1].summaries = {0: missed, 1: {"status": "failed", "error": "boom"}}
    return state


def test_the_headline_names_what_each_arm_searches(design: Design, tmp_path: Path) -> None:
    first, second = design.arms
    alike = headline(SweepState(design, tmp_path))
    assert alike[1] == f"searched: {', '.join(axis.key for axis in first.axes)}"
    fixed = replace(design, arms=(first, replace(second, axes=first.axes[1:])))
    told = headline(SweepState(fixed, tmp_path))
    assert told[1] == f"searched: {first.axes[0].key} (in 1 arm), {first.axes[1].key}"
    assert len(headline(SweepState(replace(design, arms=(replace(first, axes=()),)), tmp_path))) == 1


def _console() -> Console:
    return Console(file=io.StringIO(), width=80, no_color=True, color_system=None)


def _shown(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


def test_each_trial_that_ends_is_a_line_with_its_number_and_the_time_left(
    design: Design, tmp_path: Path
) -> None:
    console, ended = _console(), _state(design, tmp_path)
    state = SweepState(ended.design, tmp_path)
    progress = Progress(state, console)
    for key, search in ended.searches.items():
        for index, summary in search.summaries.items():
            state.searches[key].summaries[index] = {**summary, "train_time_s": 2.0, "eval_time_s": 1.0}
    state.searches["baseline", 1].summaries = {index: {"status": "running"} for index in range(2)}
    assert progress(at_once=True) == 4
    assert progress() == 4
    assert [line.partition("; about")[0] for line in _shown(console)] == [
        "1/13  baseline/0/0: reached after 12,480 fresh examples",
        "2/13  baseline/0/1: diverged",
        f"3/13  {NAME}/1/0: missed the target (budget_spent), best accuracy 0.93",
        f"3/13  {NAME}/1/1: failed (boom)",
    ]
    assert _shown(console)[-1].endswith("about 0:15 left")  # ten are missing, 3 s each, two at a time
