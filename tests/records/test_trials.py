"""Rows that were written as a table come back as they were."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaecho.records.trials import read_rows, table_text

ROW: dict[str, Any] = {
    "experiment": "fig3", "arm": "baseline", "repeat": 0, "counted": True, "baseline": None,
    "hyperparameters": {"optimizer.learning_rate": 0.1, "optimizer.momentum": 0.9},
    "to_target_fresh_examples": 1600, "best_value": 0.9722222222222222,
}  # fmt: skip


OF_NO_POINT = ROW | {"hyperparameters": {}}
TABLES = {
    "one row": [ROW],
    "of another cost": [ROW, ROW | {"repeat": 1, "to_target_fresh_examples": None}],
    "no points": [OF_NO_POINT, OF_NO_POINT | {"repeat": 1}],
    "a point in the second": [OF_NO_POINT, ROW],
    "a point in the first": [ROW, OF_NO_POINT],
    "another point": [ROW, ROW | {"hyperparameters": {"schedule.decay_steps": 10}, "repeat": True}],
}


@pytest.mark.parametrize("rows", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("text_of", [table_text, json.dumps], ids=["a table", "a sweep's own list"])
def test_rows_come_back_as_they_were(
    rows: list[dict[str, Any]], text_of: Callable[[Any], str], tmp_path: Path
) -> None:
    (tmp_path / "trials.json").write_text(text_of(rows))
    assert read_rows(tmp_path / "trials.json") == rows


def test_constant_columns_are_written_once_and_what_a_row_lacks_is_null(tmp_path: Path) -> None:
    text = table_text([ROW, ROW | {"repeat": 1}, ROW | {"repeat": 2}])
    assert text.count("fig3") == text.count("null") == 1
    assert text.splitlines()[-4:] == ["[0],", "[1],", "[2]", "]}"]
    (tmp_path / "trials.json").write_text(table_text([ROW, {"arm": "b"}]))
    lacking = {**dict.fromkeys(ROW), "arm": "b", "hyperparameters": {}}  # part of a point is not null
    assert read_rows(tmp_path / "trials.json")[1] == lacking
