"""Rows of trials, and the tables collected from a sweep."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaecho.config.identity import run_id
from adaecho.errors import FolderError
from adaecho.records.collect import best_curves, collect_sweep, main, trial_row, write_tables
from adaecho.records.folder import RunFolder
from adaecho.records.outcome import ends, outcome
from adaecho.records.trials import read_rows, table_text


def make_run(path, *, variant="none", factor=1, cost=320, status="reached", **more):
    config = {
        "task": {"name": "digits"}, "data": {"path": None}, "echo": {"variant": variant, "factor": factor},
        "evaluate": {}, "target": {"metric": "accuracy", "value": 0.97, "consecutive": 1}, "seed": 3,
        "batch_size": 32,
    }  # fmt: skip
    to_target = {"fresh_examples": cost, "steps": 10, "train_time_s": 0.5}
    summary = {
        "status": status, "to_target": to_target if status == "reached" else None,
        "hyperparameters": {"optimizer.learning_rate": 0.1, "optimizer.momentum": 0.9},
        "best": {"metric": "accuracy", "value": 0.98, "fresh_examples": cost},
        "fresh_examples": cost, "steps": 10, "train_time_s": 0.6, **more,
    }  # fmt: skip
    run = RunFolder(path)
    with run.lock():
        run.start(config, (), {"host": variant, "slurm": {"job_id": str(path)}})
        for fresh_examples in range(160, cost + 1, 160):
            run.append_metrics({"fresh_examples": fresh_examples, "accuracy": fresh_examples / 320})
        run.write_summary(summary)
    return config, summary


def make_sweep(sweep, *runs, **more):
    """A sweep of runs, each an arm, an index and arguments of ``make_run``; returns its rows."""
    rows = []
    for arm, index, arguments in runs:
        config, summary = make_run(sweep / arm / "0" / str(index), **arguments)
        rows.append(trial_row(config, summary, experiment="x", arm=arm, index=index, **more))
    (sweep / "trials.json").write_text(json.dumps(rows))
    return rows


def tables(folder):
    return {path.stem: read_rows(path) for path in folder.iterdir()}


def test_a_row_holds_what_outcome_needs(tmp_path):
    config, summary = make_run(tmp_path / "run", variant="batch", factor=2)
    row = trial_row(config, summary, experiment="x", arm="batch_e2", repeat=1, index=4)
    assert row == {
        "experiment": "x", "task": "digits", "arm": "batch_e2", "echo_variant": "batch", "echo_factor": 2,
        "baseline": None, "batch_size": 32, "shuffle_buffer": 0, "batch_shuffle_buffer": 0, "repeat": 1,
        "index": 4, "status": "reached", "counted": True, "seed": 3, "run_id": run_id(config),
        "hyperparameters": {"optimizer.learning_rate": 0.1, "optimizer.momentum": 0.9},
        "target_metric": "accuracy", "target_value": 0.97, "target_in_a_row": 1,
        "to_target_fresh_examples": 320, "to_target_steps": 10, "to_target_train_time_s": 0.5,
        "best_value": 0.98, "fresh_examples": 320, "steps": 10, "train_time_s": 0.6, "trained_examples": 320,
    }  # fmt: skip
    assert outcome([row])[0]["fresh_examples"]["mean"] == 320
    # A run to the end of its budget, with AdaScale:
    end = {"final": {"accuracy": 0.9, "cross_entropy": 0.3}, "gain": 1.5, "scale_invariant_steps": 15.0}
    row = trial_row(config, {**summary, **end}, experiment="x", arm="a")
    assert (row["final_accuracy"], row["final_cross_entropy"]) == (0.9, 0.3)
    assert (row["gain"], row["scale_invariant_steps"]) == (1.5, 15.0)
    own = {**summary, "target_direction": "min"}  # a user's task
    assert trial_row(config, own, experiment="x", arm="a")["target_direction"] == "min"
    # A run that crashed at once:
    row = trial_row(config, {"status": "failed"}, experiment="x", arm="a", counted=False)
    assert row["to_target_fresh_examples"] is row["best_value"] is row["steps"] is None
    assert outcome([row])[0]["failed"] == 1


def test_a_sweep_keeps_the_curves_of_best_trials_and_its_origin(tmp_path):
    sweep, results, command = (
        tmp_path / "sweep",
        tmp_path / "results",
        "python -m adaecho.run -m experiment=x",
    )
    known = {"data": {"files_sha256": "ab"}}
    rows = make_sweep(
        sweep,
        ("baseline", 0, {"cost": 640, "sample": "babble", **known}),
        ("baseline", 1, {"cost": 320, **known}),
    )
    main([str(sweep), "--results", str(results), "--command", command])
    found = tables(results / "x" / "digits")
    assert found["trials"] == rows
    (curve,) = found["curves"]
    assert (curve["index"], curve["fresh_examples"], curve["values"]) == (1, [160, 320], [0.5, 1.0])
    assert curve["last"] == {"fresh_examples": 320, "accuracy": 1.0}
    assert found["outcome"] == outcome(rows)
    origin = {"commands": [command], "environments": [{"host": "none"}], "data": [known["data"]]}
    assert found["origin"] == {**origin, "sample": "babble"}


def test_a_search_of_one_trial_has_a_curve_if_it_missed(tmp_path):
    missed = {"status": "budget_spent"}
    arms = [("alone", 0, missed), ("searched", 0, missed), ("searched", 1, missed), ("reached", 0, {})]
    rows = make_sweep(tmp_path, *arms)
    assert [curve["arm"] for curve in best_curves(rows, tmp_path)] == ["alone", "reached"]
    rows[0]["counted"] = False
    assert [curve["arm"] for curve in best_curves(rows, tmp_path)] == ["reached"]


def test_without_a_target_a_curve_belongs_to_a_trial_that_spent_its_budget(tmp_path):
    rows = make_sweep(tmp_path, ("a", 0, {"status": "diverged"}), ("a", 1, {"status": "budget_spent"}))
    for row, best in zip(rows, (0.99, 0.85), strict=True):
        row |= {"target_value": None, "best_value": best, "target_direction": "max"}
    assert [curve["index"] for curve in best_curves(rows, tmp_path)] == [1]
    assert ends(rows)[0]["best_value"]["max"] == 0.85


def test_what_cannot_be_collected_is_named(tmp_path):
    with pytest.raises(FolderError, match=r"sweep: no trials\.json"):
        collect_sweep(tmp_path / "sweep", tmp_path, "x")
    rows = make_sweep(tmp_path / "sweep", ("a", 0, {}), ("b", 0, {}))
    (tmp_path / "sweep/trials.json").write_text(json.dumps([rows[0], {**rows[1], "task": "small_text"}]))
    with pytest.raises(FolderError, match="its arms belong to digits and small_text; run one sweep for each"):
        collect_sweep(tmp_path / "sweep", tmp_path / "results", "x")
    assert not (tmp_path / "results").exists()


def test_a_table_without_curves_leaves_no_older_ones(tmp_path):
    (tmp_path / "curves.json").write_text("[]")
    write_tables(tmp_path, {"trials.json": "[]"}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["origin.json", "trials.json"]


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


def test_constant_columns_are_written_once_and_missing_values_are_null(tmp_path: Path) -> None:
    text = table_text([ROW, ROW | {"repeat": 1}, ROW | {"repeat": 2}])
    assert text.count("fig3") == text.count("null") == 1
    assert text.splitlines()[-4:] == ["[0],", "[1],", "[2]", "]}"]
    (tmp_path / "trials.json").write_text(table_text([ROW, {"arm": "b"}]))
    lacking = {
        **dict.fromkeys(ROW),
        "arm": "b",
        "hyperparameters": {},
    }  # a missing part of a dict stays missing
    assert read_rows(tmp_path / "trials.json")[1] == lacking
