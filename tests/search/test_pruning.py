from pathlib import Path

import pytest

from adaecho.errors import ConfigError
from adaecho.records.files import write_json
from adaecho.search.state import Pruner
from tests.search.conftest import Command


def _write(folder: Path, index: int, status: str, fresh_examples: int | None) -> None:
    (folder / str(index)).mkdir(exist_ok=True)
    to_target = None if fresh_examples is None else {"fresh_examples": fresh_examples}
    write_json(folder / str(index) / "summary.json", {"status": status, "to_target": to_target})


def test_a_trial_is_pruned_beyond_the_best_complete_one_of_its_search(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "notes").mkdir()
    prune = Pruner(tmp_path / "0")
    assert not prune(10**9)
    _write(tmp_path, 1, "diverged", None)
    _write(tmp_path, 2, "running", None)
    _write(tmp_path, 3, "reached", 800)
    assert not prune(800)
    assert prune(801)
    _write(tmp_path, 2, "reached", 400)
    assert prune(401)


def test_a_sibling_that_is_damaged_or_moved_aside_is_passed_over(tmp_path: Path) -> None:
    prune = Pruner(tmp_path / "0")
    _write(tmp_path, 1, "reached", 800)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "summary.json").write_text("")  # as a power cut may leave it
    assert prune(801)
    _write(tmp_path, 2, "reached", 400)
    assert prune(401)


def test_it_is_refused_where_missed_or_diverged_trials_are_compared(run_sweep: Command) -> None:
    with pytest.raises(ConfigError, match="experiment that compares"):
        run_sweep("search.prune=true", "search.needs_every_trial=true")
