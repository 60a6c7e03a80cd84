from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from adaecho.errors import FolderError
from adaecho.records.files import write_json
from adaecho.search.design import Design, TrialId
from adaecho.search.state import Pruner, Search, SweepState


def _search(design: Design, statuses: dict[int, str], trials: int = 3, max_diverged: int = 6) -> Search:
    summaries: dict[int, dict[str, Any]] = {index: {"status": status} for index, status in statuses.items()}
    return Search(design.arms[0], 0, trials, max_diverged, summaries)


def test_a_search_needs_one_more_point_per_diverged_trial(design: Design) -> None:
    assert list(_search(design, {}).missing()) == [0, 1, 2]
    assert list(_search(design, {0: "diverged", 2: "reached"}).missing()) == [1, 3]
    complete = _search(design, {0: "diverged", 1: "reached", 2: "diverged", 3: "budget_spent", 4: "reached"})
    assert list(complete.missing()) == []
    assert complete.is_complete()
    assert complete.counted() == {1, 3, 4}


def test_the_points_of_a_search_do_not_depend_on_the_order_in_which_trials_end(design: Design) -> None:
    diverging = {0, 3}
    for order in permutations(range(3)):
        search = _search(design, {})
        for place in order:
            while (left := list(search.missing())) and place < len(left):
                index = left[place]
                search.summaries[index] = {"status": "diverged" if index in diverging else "reached"}
        while left := list(search.missing()):
            search.summaries[left[-1]] = {"status": "diverged" if left[-1] in diverging else "reached"}
        assert sorted(search.summaries) == [0, 1, 2, 3, 4]
        assert search.counted() == {1, 2, 4}


def test_replacement_ends_at_max_diverged(design: Design) -> None:
    search = _search(design, dict.fromkeys(range(10), "diverged"), max_diverged=2)
    assert search.num_wanted() == 5
    assert list(search.missing()) == []
    assert not search.is_complete()
    unforgiving = _search(design, {0: "diverged"}, max_diverged=0)
    assert list(unforgiving.missing()) == [1, 2]


def test_further_trials_are_not_counted(design: Design) -> None:
    search = _search(design, dict.fromkeys(range(5), "reached"))
    assert search.counted() == {0, 1, 2}
    for index, summary in search.summaries.items():
        summary["to_target"] = {"fresh_examples": 100 - index}
    assert search.best() == 98


def test_failed_running_and_preempted_trials_are_missing_and_keep_their_place(design: Design) -> None:
    search = _search(design, {0: "failed", 1: "running", 2: "preempted", 3: "reached"})
    assert list(search.missing()) == [0, 1, 2]
    assert search.counted() == set()
    assert not search.is_complete()


def test_without_axes_there_is_one_trial_per_search(design: Design, tmp_path: Path) -> None:
    fixed = replace(design.arms[0], axes=())
    state = SweepState(replace(design, arms=(fixed,)), tmp_path)
    assert state.missing() == [TrialId(fixed.name, 0, 0), TrialId(fixed.name, 1, 0)]
    for search in state.searches.values():
        search.summaries[0] = {"status": "diverged"}
    assert state.missing() == [], "no other point could replace it"


def test_missing_trials_come_repeat_by_repeat_and_index_by_index(design: Design, tmp_path: Path) -> None:
    first, second = (arm.name for arm in design.arms)
    missing = SweepState(design, tmp_path).missing()
    assert missing[:3] == [TrialId(first, 0, 0), TrialId(second, 0, 0), TrialId(first, 0, 1)]
    assert len(missing) == len(set(missing)) == 12


def test_the_state_is_what_the_folders_say(design: Design, tmp_path: Path) -> None:
    trial = TrialId(design.arms[1].name, 1, 2)
    folder = SweepState(design, tmp_path).trial_folder(trial)
    folder.mkdir(parents=True)
    (folder.parent / "notes.old-1").mkdir()
    write_json(folder / "summary.json", {"status": "reached", "to_target": {"fresh_examples": 320}})
    state = SweepState(design, tmp_path)
    assert trial not in state.missing()
    assert state.search(trial).best() == 320


@pytest.mark.parametrize("depth", range(4))
def test_nothing_in_a_sweep_is_reached_through_a_link(design: Design, tmp_path: Path, depth: int) -> None:
    """One that was received may have them lead to any folder of one's own."""
    (tmp_path / "mine").mkdir()
    sweep, arm = tmp_path / "sweep", design.arms[0].name
    link = sweep / ("workers", arm, f"{arm}/0", f"{arm}/0/1")[depth]
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "mine")
    with pytest.raises(FolderError, match=f"{link.name}: leads elsewhere by a symbolic link"):
        SweepState(design, sweep)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["\N{SUPERSCRIPT TWO}", "536870911", "9" * 200])
def test_a_folder_whose_number_is_no_index_is_no_trial(design: Design, tmp_path: Path, name: str) -> None:
    """Of one the points up to it would be drawn."""
    folder = tmp_path / design.arms[0].name / "0" / name
    folder.mkdir(parents=True)
    write_json(folder / "summary.json", {"status": "reached", "seed": 0})
    assert SweepState(design, tmp_path).search(TrialId(design.arms[0].name, 0, 0)).summaries == {}


def test_one_look_sees_a_replacement_that_ended_before_its_diverged_trial_was_seen(
    design: Design, tmp_path: Path
) -> None:
    """The last look at a sweep, after its workers have ended, is the one that its outcome is made of."""
    state = SweepState(design, tmp_path)
    statuses = ["reached", "diverged", "reached", "diverged", "reached"]
    for (arm, repeat), search in state.searches.items():
        assert search.trials == 3
        for index, status in enumerate(statuses):
            folder = state.trial_folder(TrialId(arm, repeat, index))
            folder.mkdir(parents=True)
            write_json(folder / "summary.json", {"status": status, "to_target": {"fresh_examples": 1}})
    state.refresh()
    assert state.missing() == []
    assert all(search.is_complete() for search in state.searches.values())


def _write_summary(folder: Path, index: int, status: str, fresh_examples: int | None) -> None:
    (folder / str(index)).mkdir(exist_ok=True)
    to_target = None if fresh_examples is None else {"fresh_examples": fresh_examples}
    write_json(folder / str(index) / "summary.json", {"status": status, "to_target": to_target})


def test_a_trial_is_pruned_beyond_the_best_complete_one_of_its_search(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "notes").mkdir()
    prune = Pruner(tmp_path / "0")
    assert not prune(10**9)
    _write_summary(tmp_path, 1, "diverged", None)
    _write_summary(tmp_path, 2, "running", None)
    _write_summary(tmp_path, 3, "reached", 800)
    assert not prune(800)
    assert prune(801)
    _write_summary(tmp_path, 2, "reached", 400)
    assert prune(401)


def test_a_sibling_that_is_damaged_or_moved_aside_is_passed_over(tmp_path: Path) -> None:
    prune = Pruner(tmp_path / "0")
    _write_summary(tmp_path, 1, "reached", 800)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "summary.json").write_text("")  # as a power cut may leave it
    assert prune(801)
    _write_summary(tmp_path, 2, "reached", 400)
    assert prune(401)
