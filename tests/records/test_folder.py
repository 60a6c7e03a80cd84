"""The run folder: begins, continues and refuses runs; writes only under its lock."""

import json
import os
from copy import deepcopy

import pytest

from adaecho.config.schema import from_plain
from adaecho.errors import FolderError
from adaecho.records.folder import FolderInUseError, RunFolder

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
    "restart": False,
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
    folder.start(CONFIG, ["echo=batch", "echo.factor=2"], {"host": "a"})
    text = (folder.path / "config.yaml").read_text()
    assert text.startswith('# overrides: ["echo=batch", "echo.factor=2"]\n')
    assert from_plain(folder.read_config()).optimizer.learning_rate == 1e-5
    assert folder.read_config() == CONFIG
    assert json.loads((folder.path / "environment.json").read_text()) == {"host": "a"}
    assert folder.checkpoint.parent.is_dir()
    assert folder.read_summary() is None
    assert folder.read_metrics() == []


def test_a_run_continues_on_another_host_and_with_larger_budgets(folder):
    folder.start(CONFIG, (), {"host": "a"})
    for host in "bbc":
        folder.start(CONFIG, (), {"host": host})
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment == {"host": "c", "earlier": [{"host": "a"}, {"host": "b"}]}
    wider = changed(tracking={"kind": "wandb"}, data__num_workers=4, max_fresh_examples=80000)
    folder.start(wider)
    assert folder.read_config()["max_fresh_examples"] == 80000
    folder.start(changed(max_fresh_examples=None))


def test_a_different_run_and_a_smaller_budget_are_refused_with_every_difference(folder):
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
    assert "restart=true" in message
    assert folder.read_config() == CONFIG


def test_fresh_renames_the_old_runs(folder):
    for number in range(3):
        folder.start(changed(batch_size=number), restart=True)
        folder.append_metrics({"number": number})
        assert folder.read_metrics() == [{"number": number}]
    old = [RunFolder(folder.path.with_name(f"run.old-{number}")) for number in (1, 2)]
    assert [run.read_metrics() for run in old] == [[{"number": 0}], [{"number": 1}]]
    assert len(list(folder.path.parent.iterdir())) == 3, "the first moved nothing"
    with pytest.raises(FolderError, match=f"process {os.getpid()}"), RunFolder(folder.path).lock():
        pass


def test_metrics_are_lines_of_strict_json_cut_back_to_a_checkpoint(folder):
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
    folder.truncate_metrics(0)
    assert path.read_bytes() == b""


def test_tracebacks_of_all_attempts_stay(folder):
    folder.write_traceback("ValueError: one\n")
    folder.write_traceback("ValueError: two")
    text = (folder.path / "traceback.txt").read_text()
    assert text.index("ValueError: one\n") < text.index("ValueError: two\n")
    assert text.count("\n") == 4


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
    with pytest.raises(FolderError, match="does not hold the lock"):
        write(run)
    with run.lock():
        write(run)
        (run.path / "lock").write_text("{}")  # another process took over
        with pytest.raises(FolderInUseError, match="does not hold the lock"):
            write(run)


def test_urls_in_a_config_lose_user_password_and_query(folder):
    url = "https://bob:pw@h:80/a-{0..3}.tar?X-Amz-Signature=abc&b=1"
    folder.start(changed(data__path=url), [f"data.path={url}"])
    folder.start(changed(data__path=url.replace("abc", "def")))  # signed anew
    folder.write_traceback(f"ValueError: {url} is gone")
    for name in ("config.yaml", "traceback.txt"):
        text = (folder.path / name).read_text()
        assert "https://***@h:80/a-{0..3}.tar?***" in text
        assert "pw" not in text
        assert "abc" not in text
