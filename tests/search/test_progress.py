"""What a sweep shows, on a narrow terminal without colour and in a log."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from adaecho.search.design import Design, TrialId
from adaecho.search.progress import SweepProgress, arm_table
from adaecho.search.state import SweepState
from adaecho.search.sweeper import headline

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
    alike = headline(SweepState(design, tmp_path)).splitlines()
    assert alike[1] == f"searched: {', '.join(axis.key for axis in first.axes)}"
    fixed = replace(design, arms=(first, replace(second, axes=first.axes[1:])))
    told = headline(SweepState(fixed, tmp_path)).splitlines()
    assert told[1] == f"searched: {first.axes[0].key} (in 1 arm), {first.axes[1].key}"
    assert "\n" not in headline(SweepState(replace(design, arms=(replace(first, axes=()),)), tmp_path))


def _console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, no_color=True, color_system=None)


def _shown(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_table_fits_80_columns_and_counts(design: Design, tmp_path: Path) -> None:
    console = _console(terminal=False)
    console.print(arm_table(_state(design, tmp_path), [TrialId(NAME, 0, 0), TrialId(NAME, 0, 1)]))
    lines = [line.split() for line in _shown(console)]
    assert lines[0] == ["arm", "done", "running", "diverged", "missed", "failed", "best"]
    assert lines[1] == ["baseline", "2/7", "-", "1", "-", "-", "12,480"]
    assert lines[2] == [NAME, "1/6", "2", "-", "1", "1", "-"]


def test_a_terminal_gets_a_live_table_with_the_time_left(design: Design, tmp_path: Path) -> None:
    console = _console(terminal=True)
    state = _state(design, tmp_path)
    with SweepProgress(state, console=console) as progress:
        progress.show([])
        progress.ended(TrialId("baseline", 0, 0), duration_s=10.0)
        progress.show([TrialId("baseline", 0, 2), TrialId(NAME, 0, 0)])
    shown = "\n".join(_shown(console))
    assert "time left not known yet" in shown
    assert "about 0:50 left" in shown  # 10 trials are missing, 10 s each, two at a time
    assert "reached after" not in shown


def test_a_log_gets_one_line_per_trial(design: Design, tmp_path: Path) -> None:
    console = _console(terminal=False)
    ends = (("baseline", 0, 0, 2.0), ("baseline", 0, 1, 2.0), (NAME, 1, 0, 800.0), (NAME, 1, 1, 2.0))
    with SweepProgress(_state(design, tmp_path), console=console) as progress:
        progress.show([TrialId("baseline", 0, 0), TrialId("baseline", 0, 1)])
        for *trial, duration_s in ends:
            progress.ended(TrialId(*trial), duration_s=duration_s)
    assert [line.partition("; about")[0] for line in _shown(console)] == [
        "3/13  baseline/0/0: reached after 12,480 fresh examples",
        "3/13  baseline/0/1: diverged",
        f"3/13  {NAME}/1/0: missed the target (budget_spent), best accuracy 0.93",
        f"3/13  {NAME}/1/1: failed (boom)",
    ]
    assert _shown(console)[2].endswith("about 33:25 left")


def test_each_line_of_one_look_carries_its_own_number(design: Design, tmp_path: Path) -> None:
    console, state, arm = _console(terminal=False), SweepState(design, tmp_path), design.arms[0].name
    with SweepProgress(state, console=console) as progress:
        for index, status in enumerate(("diverged", "failed", "diverged")):
            state.searches[arm, 0].summaries[index] = {"status": status, "error": "boom"}
        progress.update(at_once=True)
    numbers = [line.partition(":")[0] for line in _shown(console)]
    assert numbers == [f"1/14  {arm}/0/0", f"1/14  {arm}/0/1", f"2/14  {arm}/0/2"]
