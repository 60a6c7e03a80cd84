from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from adaecho.records.files import write_json
from adaecho.search.design import Design, TrialId
from adaecho.search.state import Search, SweepState, cannot_win


def _search(design: Design, *statuses: str | None, max_diverged: int = 6) -> Search:
    """A search of three trials with these statuses."""
    ended = {index: {"status": status} for index, status in enumerate(statuses) if status}
    return Search(design.arms[0], 0, 3, max_diverged, ended)


@pytest.mark.parametrize(
    ("statuses", "max_diverged", "missing", "counted"),
    [
        ((), 6, [0, 1, 2], set()),
        (("diverged", None, "reached"), 6, [1, 3], {2}),
        (("diverged", "reached", "diverged", "budget_spent", "reached"), 6, [], {1, 3, 4}),
        (("diverged",), 0, [1, 2], set()),
        (("diverged",) * 10, 2, [], set()),
        (("reached",) * 5, 6, [], {0, 1, 2}),
        (("failed", "running", "preempted", "reached"), 6, [0, 1, 2], None),
    ],
    ids=["none", "one more per diverged", "complete", "none replaced", "to max_diverged", "further",
         "those that failed, run or were preempted keep their place"],
)  # fmt: skip
def test_which_trials_of_a_search_are_missing_and_counted(
    design: Design, statuses: tuple[str, ...], max_diverged: int, missing: list[int], counted: set[int] | None
) -> None:
    search = _search(design, *statuses, max_diverged=max_diverged)
    assert list(search.missing()) == missing
    assert search.counted() == (counted or set())
    assert len(search.wanted()) == 3 + min(statuses.count("diverged"), max_diverged)


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


def test_one_refresh_finds_diverged_trials_and_their_replacements(design: Design, tmp_path: Path) -> None:
    """The outcome uses a single refresh after the workers have ended."""
    state = SweepState(design, tmp_path)
    statuses = ["reached", "diverged", "reached", "diverged", "reached"]
    for (arm, repeat), search in state.searches.items():
        assert search.trials == 3
        for index, status in enumerate(statuses):
            folder = tmp_path / str(TrialId(arm, repeat, index))
            folder.mkdir(parents=True)
            write_json(folder / "summary.json", {"status": status, "to_target": {"fresh_examples": 1}})
    state.refresh()
    assert state.missing() == []
    assert all(len(search.counted()) == 3 for search in state.searches.values())


def _write_summary(folder: Path, index: int, status: str, fresh_examples: int | None) -> None:
    (folder / str(index)).mkdir(exist_ok=True)
    to_target = None if fresh_examples is None else {"fresh_examples": fresh_examples}
    write_json(folder / str(index) / "summary.json", {"status": status, "to_target": to_target})


def test_a_trial_is_pruned_beyond_the_best_complete_one_of_its_search(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "notes").mkdir()
    prune = partial(cannot_win, tmp_path / "0")
    assert not prune(10**9)
    _write_summary(tmp_path, 1, "diverged", None)
    _write_summary(tmp_path, 2, "running", None)
    _write_summary(tmp_path, 3, "reached", 800)
    assert (prune(800), prune(801)) == (False, True)
    _write_summary(tmp_path, 2, "reached", 400)
    assert (prune(400), prune(401)) == (False, True)
