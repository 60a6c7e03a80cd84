from pathlib import Path

import pytest

from adaecho.errors import ConfigError
from adaecho.records.files import write_json
from adaecho.search.hopeless import Hopeless
from tests.search.conftest import Command


def _write(folder: Path, index: int, status: str, fresh_examples: int | None) -> None:
    (folder / str(index)).mkdir(exist_ok=True)
    to_target = None if fresh_examples is None else {"fresh_examples": fresh_examples}
    write_json(folder / str(index) / "summary.json", {"status": status, "to_target": to_target})


def test_a_trial_is_hopeless_beyond_the_best_complete_one_of_its_search(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "notes").mkdir()
    is_hopeless = Hopeless(tmp_path / "0")
    assert not is_hopeless(10**9)
    _write(tmp_path, 1, "diverged", None)
    _write(tmp_path, 2, "running", None)
    _write(tmp_path, 3, "reached", 800)
    assert not is_hopeless(800)
    assert is_hopeless(801)
    _write(tmp_path, 2, "reached", 400)
    assert is_hopeless(401)


def test_it_is_refused_where_missed_or_diverged_trials_are_compared(run_sweep: Command) -> None:
    with pytest.raises(ConfigError, match="experiment that compares"):
        run_sweep("search.stop_hopeless=true", "search.needs_every_trial=true")
