"""Rows that were written as a table come back as they were."""

import json
from pathlib import Path
from typing import Any

import pytest

from adaecho.records.trials import read_rows, table_text

ROW: dict[str, Any] = {
    "experiment": "fig3", "arm": "baseline", "repeat": 0, "counted": True, "baseline": None,
    "hyperparameters": {"optimizer.learning_rate": 0.1, "optimizer.momentum": 0.9},
    "to_target_fresh_examples": 1600, "best_value": 0.9722222222222222,
}  # fmt: skip


@pytest.mark.parametrize(
    "rows",
    [
        [ROW],
        [ROW, ROW | {"repeat": 1, "to_target_fresh_examples": None}],
        [ROW | {"hyperparameters": {}}, ROW | {"hyperparameters": {}, "repeat": 1}],
        [ROW | {"hyperparameters": {}}, ROW],
        [ROW, ROW | {"hyperparameters": {}}],
        [ROW, ROW | {"hyperparameters": {"schedule.decay_steps": 10}, "repeat": True}],
    ],
)
def test_rows_come_back_as_they_were(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "trials.json").write_text(table_text(rows))
    assert read_rows(tmp_path / "trials.json") == rows


def test_what_a_row_lacks_is_null_unless_it_is_part_of_a_point(tmp_path: Path) -> None:
    (tmp_path / "trials.json").write_text(table_text([ROW, {"arm": "b"}]))
    assert read_rows(tmp_path / "trials.json")[1] == {**dict.fromkeys(ROW), "arm": "b", "hyperparameters": {}}


def test_constant_columns_are_written_once_and_each_row_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "trials.json").write_text(table_text([ROW, ROW | {"repeat": 1}, ROW | {"repeat": 2}]))
    text = (tmp_path / "trials.json").read_text()
    assert text.count("fig3") == text.count("null") == 1
    assert text.splitlines()[-4:] == ["[0],", "[1],", "[2]", "]}"]


def test_a_sweeps_own_list_of_rows_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "trials.json").write_text(json.dumps([ROW]))
    assert read_rows(tmp_path / "trials.json") == [ROW]
