import json
import os
from copy import deepcopy

import pytest

from adaecho.config.schema import from_plain
from adaecho.errors import FolderError
from adaecho.records.folder import RunFolder
from adaecho.records.lock import FolderInUseError

CONFIG = {
    "task": {"name": "digits"},
    "data": {"path": None, "validation_examples": 360, "num_workers": 0, "prefetch": 2},
    "echo": {"variant": "batch", "factor": 2, "shuffle_buffer": 256},
    "adascale": {"enabled": False},
    "optimizer": {"learning_rate": 1e-5, "momentum": 0.9, "nesterov": True},
    "target": {"metric": "accuracy", "value": 0.97},
    "evaluate": {"every_fresh_examples": 160},
    "tracking": {"kind": "none"},
    "batch_size": 32,
    "max_steps": None,
    "max_fresh_examples": 40000,
    "fresh": False,
}


def changed(**values):
    config = deepcopy(CONFIG)
    for key, value in values.items():
        section, _, name = key.partition("__")
        if name:
            config[section][name] = value
        else:
            config[section] = value
    return config


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    with run.lock():
        yield run


def test_a_new_folder_holds_config_overrides_and_environment(folder):
    assert folder.start(CONFIG, ["echo=batch", "echo.factor=2"], {"host": "a"}) is False
    text = (folder.path / "config.yaml").read_text()
    assert text.startswith('# overrides: ["echo=batch", "echo.factor=2"]\n')
    assert from_plain(folder.read_config()).optimizer.learning_rate == 1e-5
    assert folder.read_config() == CONFIG
    assert json.loads((folder.path / "environment.json").read_text()) == {"host": "a"}
    assert folder.checkpoint_dir.is_dir()
    assert folder.read_summary() is None
    assert folder.read_metrics() == []


def test_the_same_run_continues_and_keeps_earlier_environments(folder):
    folder.start(CONFIG, (), {"host": "a"})
    assert folder.start(CONFIG, (), {"host": "b"}) is True
    folder.start(CONFIG, (), {"host": "b"})
    folder.start(CONFIG, (), {"host": "c"})
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment == {"host": "c", "earlier": [{"host": "a"}, {"host": "b"}]}


def test_what_cannot_change_the_trajectory_and_larger_budgets_may_differ(folder):
    folder.start(CONFIG)
    wider = changed(tracking={"kind": "wandb"}, data__num_workers=4, max_fresh_examples=80000)
    assert folder.start(wider) is True
    assert folder.read_config()["max_fresh_examples"] == 80000
    assert folder.start(changed(max_fresh_examples=None)) is True


def test_another_run_is_refused_with_every_difference(folder):
    folder.start(CONFIG)
    other = changed(echo__factor=4, optimizer__learning_rate=0.1, batch_size=64)
    other["seed"] = 3
    with pytest.raises(FolderError) as error:
        folder.start(other)
    message = str(error.value)
    assert str(folder.path) in message
    assert "echo.factor: 2 in the folder, 4 now" in message
    assert "optimizer.learning_rate: 1e-05 in the folder, 0.1 now" in message
    assert "batch_size: 32 in the folder, 64 now" in message
    assert "seed: absent in the folder, 3 now" in message
    assert "fresh=true" in message
    assert folder.read_config() == CONFIG


@pytest.mark.parametrize(("budget", "now"), [("max_fresh_examples", 39999), ("max_steps", 10)])
def test_a_smaller_budget_is_refused(folder, budget, now):
    folder.start(CONFIG)
    with pytest.raises(
        FolderError, match=rf"{budget}: \w+ in the folder, {now} now \(a budget can only grow\)"
    ):
        folder.start(changed(**{budget: now}))


def test_fresh_keeps_the_old_runs_beside_the_new_one(folder):
    for number in range(3):
        resumed = folder.start(changed(batch_size=number), fresh=True)
        folder.append_metrics({"number": number})
        assert not resumed
        assert folder.read_metrics() == [{"number": number}]
    old = [RunFolder(folder.path.with_name(f"run.old-{number}")) for number in (1, 2)]
    assert [run.read_metrics() for run in old] == [[{"number": 0}], [{"number": 1}]]
    assert not any((run.path / "lock").exists() for run in old)
    with pytest.raises(FolderError, match=f"process {os.getpid()}"), RunFolder(folder.path).lock():
        pass


def test_fresh_in_a_new_folder_moves_nothing(folder):
    folder.start(CONFIG, fresh=True)
    assert [path.name for path in folder.path.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoint/last.pt"])
def test_records_without_a_config_are_refused(folder, name):
    folder.checkpoint_dir.mkdir()
    (folder.path / name).write_text("{}\n")
    with pytest.raises(FolderError, match=r"no config\.yaml.*fresh=true"):
        folder.start(CONFIG)
    assert folder.start(CONFIG, fresh=True) is False


def test_metrics_are_flat_strict_json_lines(folder):
    folder.append_metrics({"fresh_examples": 160, "accuracy": 0.5})
    folder.append_metrics({"fresh_examples": 320, "loss": float("nan")})
    text = (folder.path / "metrics.jsonl").read_text()
    assert text == '{"fresh_examples": 160, "accuracy": 0.5}\n{"fresh_examples": 320, "loss": null}\n'
    assert folder.read_metrics()[1] == {"fresh_examples": 320, "loss": None}


def test_resume_cuts_metrics_back_to_the_checkpoint(folder):
    for number in range(4):
        folder.append_metrics({"number": number})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"number": 4, "acc')
    assert [line["number"] for line in folder.read_metrics()] == [0, 1, 2, 3]
    folder.truncate_metrics(2)
    folder.append_metrics({"number": 20})
    assert [line["number"] for line in folder.read_metrics()] == [0, 1, 20]
    folder.truncate_metrics(0)
    assert (folder.path / "metrics.jsonl").read_bytes() == b""


def test_truncating_to_lines_that_are_missing_is_refused(folder):
    folder.truncate_metrics(0)
    folder.append_metrics({"number": 0})
    with pytest.raises(FolderError, match="1 lines, but the checkpoint was written after 2"):
        folder.truncate_metrics(2)
    assert len(folder.read_metrics()) == 1


def test_a_damaged_line_within_is_named(folder):
    (folder.path / "metrics.jsonl").write_text('{"a": 1}\n{"a\n{"a": 3}\n')
    with pytest.raises(FolderError, match="line 2 is damaged"):
        folder.read_metrics()


def test_summary_is_replaced_whole(folder):
    folder.start(CONFIG)
    folder.write_summary({"status": "running"})
    folder.write_summary({"status": "reached", "to_target": {"steps": 7}})
    assert folder.read_summary() == {"status": "reached", "to_target": {"steps": 7}}
    (folder.path / "summary.json").write_text("{")
    with pytest.raises(FolderError, match=r"summary\.json: damaged"):
        folder.read_summary()


def test_tracebacks_of_all_attempts_stay(folder):
    folder.write_traceback("ValueError: one\n")
    folder.write_traceback("ValueError: two")
    text = (folder.path / "traceback.txt").read_text()
    assert text.index("ValueError: one\n") < text.index("ValueError: two\n")
    assert text.count("\n") == 4


def test_start_removes_what_a_kill_left_of_an_atomic_write(folder):
    folder.start(CONFIG)
    (folder.path / "model").mkdir()
    names = (".summary.json.1.tmp", "checkpoint/.last.pt.1.tmp", "model/.final.safetensors.1.tmp")
    torn = [folder.path / name for name in names]
    for path in torn:
        path.write_text("half")
    exported = folder.path / ".wandb.json.1.tmp"  # by the export of the piece before, which may not be done
    exported.write_text("half")
    folder.start(CONFIG)
    assert not any(path.exists() for path in torn)
    assert exported.exists()


@pytest.mark.parametrize(
    "write",
    [
        lambda run: run.start(CONFIG),
        lambda run: run.append_metrics({"a": 1}),
        lambda run: run.truncate_metrics(0),
        lambda run: run.write_summary({"status": "reached"}),
        lambda run: run.write_traceback("x"),
    ],
)
def test_writing_needs_the_lock(tmp_path, write):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(FolderError, match="does not hold its lock"):
        write(run)
    with run.lock():
        write(run)
        holder = json.loads((run.path / "lock").read_text())
        (run.path / "lock").write_text("{}")  # another process took over while this one slept
        with pytest.raises(FolderError, match="does not hold its lock"):
            write(run)
        other = {**holder, "host": "elsewhere", "token": "another"}  # and is at it now
        (run.path / "lock").write_text(json.dumps(other))
        with pytest.raises(FolderInUseError, match="does not hold its lock"):
            write(run)


def test_fresh_moves_no_folder_that_holds_more_than_a_run(folder):
    folder.start(CONFIG)
    (folder.path / "thesis.tex").touch()
    with pytest.raises(FolderError, match=r"holds more than a run \(thesis\.tex\)"):
        folder.start(CONFIG, fresh=True)
    assert (folder.path / "thesis.tex").exists()
    assert folder.read_config() == CONFIG


def test_fresh_moves_nothing_that_a_process_works_in(folder, monkeypatch):
    folder.start(CONFIG)
    (folder.path / "model").mkdir()
    for inside in (folder.path, folder.path / "model"):
        monkeypatch.chdir(inside)
        with pytest.raises(FolderError, match="is or holds the current folder"):
            folder.start(CONFIG, fresh=True)
