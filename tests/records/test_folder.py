import json
import os
import shutil
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
    """``CONFIG`` with other values; ``echo__factor`` is ``echo.factor``."""
    config = deepcopy(CONFIG)
    for key, value in values.items():
        section, _, name = key.rpartition("__")
        (config[section] if section else config)[name] = value
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


def test_the_same_run_continues_also_elsewhere_and_with_larger_budgets(folder):
    folder.start(CONFIG, (), {"host": "a"})
    for host in "bbc":
        assert folder.start(CONFIG, (), {"host": host}) is True
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment == {"host": "c", "earlier": [{"host": "a"}, {"host": "b"}]}
    wider = changed(tracking={"kind": "wandb"}, data__num_workers=4, max_fresh_examples=80000)
    assert folder.start(wider) is True
    assert folder.read_config()["max_fresh_examples"] == 80000
    assert folder.start(changed(max_fresh_examples=None)) is True


def test_another_run_and_a_smaller_budget_are_refused_with_every_difference(folder):
    folder.start(CONFIG)
    other = changed(echo__factor=4, optimizer__learning_rate=0.1, batch_size=64, seed=3)
    with pytest.raises(FolderError) as error:
        folder.start(other | {"max_fresh_examples": 39999, "max_steps": 10})
    message = str(error.value)
    assert str(folder.path) in message
    assert "echo.factor: 2 in the folder, 4 now" in message
    assert "optimizer.learning_rate: 1e-05 in the folder, 0.1 now" in message
    assert "batch_size: 32 in the folder, 64 now" in message
    assert "seed: absent in the folder, 3 now" in message
    assert "max_fresh_examples: 40000 in the folder, 39999 now (a budget can only grow)" in message
    assert "max_steps: null in the folder, 10 now (a budget can only grow)" in message
    assert "fresh=true" in message
    assert folder.read_config() == CONFIG


def test_fresh_keeps_the_old_runs_beside_the_new_one(folder):
    for number in range(3):
        assert folder.start(changed(batch_size=number), fresh=True) is False
        folder.append_metrics({"number": number})
        assert folder.read_metrics() == [{"number": number}]
    old = [RunFolder(folder.path.with_name(f"run.old-{number}")) for number in (1, 2)]
    assert [run.read_metrics() for run in old] == [[{"number": 0}], [{"number": 1}]]
    assert len(list(folder.path.parent.iterdir())) == 3, "the first moved nothing"
    assert not any((run.path / "lock").exists() for run in old)
    with pytest.raises(FolderError, match=f"process {os.getpid()}"), RunFolder(folder.path).lock():
        pass


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "summary.json", "checkpoint/last.pt", "model/final.safetensors"]
)
def test_records_without_a_config_are_refused(folder, name):
    (folder.path / name).parent.mkdir(exist_ok=True)
    (folder.path / name).write_text("{}\n")
    with pytest.raises(FolderError, match=r"no config\.yaml.*fresh=true"):
        folder.start(CONFIG)
    assert folder.start(CONFIG, fresh=True) is False


def test_a_run_that_goes_on_leaves_a_hard_linked_copy_of_it_alone(folder):
    folder.start(CONFIG)
    for number in (1, 2):
        folder.append_metrics({"number": number})
    copy = folder.path.with_name("copy")
    shutil.copytree(folder.path, copy, copy_function=os.link)
    folder.truncate_metrics(1)
    folder.append_metrics({"number": 3})
    assert folder.read_metrics() == [{"number": 1}, {"number": 3}]
    assert RunFolder(copy).read_metrics() == [{"number": 1}, {"number": 2}]


def test_metrics_are_lines_of_strict_json_that_are_cut_back_to_a_checkpoint(folder):
    path = folder.path / "metrics.jsonl"
    folder.truncate_metrics(0)
    folder.append_metrics({"fresh_examples": 160, "accuracy": 0.5})
    folder.append_metrics({"fresh_examples": 320, "loss": float("nan")})
    folder.append_metrics({"fresh_examples": 480})
    text = '{"fresh_examples": 160, "accuracy": 0.5}\n{"fresh_examples": 320, "loss": null}\n'
    assert path.read_text() == text + '{"fresh_examples": 480}\n'
    with path.open("a") as file:
        file.write('{"fresh_examples": 640, "acc')
    assert [line["fresh_examples"] for line in folder.read_metrics()] == [160, 320, 480]
    folder.truncate_metrics(2)
    assert path.read_text() == text
    with pytest.raises(FolderError, match="2 lines, but the checkpoint was written after 3"):
        folder.truncate_metrics(3)
    assert path.read_text() == text
    folder.truncate_metrics(0)
    assert path.read_bytes() == b""
    path.write_text('{"a": 1}\n{"a\n{"a": 3}\n')
    with pytest.raises(FolderError, match="line 2 is damaged"):
        folder.read_metrics()


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"status": ["x"]}', '{"status": "x"}', "[" * 100_000,
                                    *(f'{{"status": "reached", "to_target": {{"steps": {cost}}}}}'
                                      for cost in ("-5", "true", "NaN", '"7"')),
                                    '{"status": "reached", "steps": -1}', '{"status": "reached", "data": 7}',
                                    '{"status": "reached", "to_target": 3}'],
                         ids=lambda damage: damage[-20:])  # fmt: skip
def test_a_summary_is_replaced_whole_and_one_of_no_status_is_damaged(folder, damage):
    folder.write_summary({"status": "running"})
    folder.write_summary({"status": "reached", "to_target": {"steps": 7}})
    assert folder.read_summary() == {"status": "reached", "to_target": {"steps": 7}}
    (folder.path / "summary.json").write_text(damage)
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


def test_fresh_moves_no_folder_that_a_process_works_in_or_that_holds_more_than_a_run(folder, monkeypatch):
    folder.start(CONFIG)
    (folder.path / "thesis.tex").touch()
    with pytest.raises(FolderError, match=r"holds more than a run \(thesis\.tex\)"):
        folder.start(CONFIG, fresh=True)
    (folder.path / "thesis.tex").unlink()
    (folder.path / "model").mkdir()
    for inside in (folder.path, folder.path / "model"):
        monkeypatch.chdir(inside)
        with pytest.raises(FolderError, match="is or holds the current folder"):
            folder.start(CONFIG, fresh=True)
    assert folder.read_config() == CONFIG
