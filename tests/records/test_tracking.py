"""The mirror in W&B: its content, and its failures, which never fail a run."""

import os
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image

from adaecho.config.schema import TrackingConfig
from adaecho.records import wandb_mirror as tracking
from adaecho.records.folder import RunFolder
from adaecho.records.wandb_mirror import exported
from tests.records import wandb_files

OFFLINE = TrackingConfig(kind="wandb", mode="offline")
URL = "https://bob:s3cretpw@host/a.tar?X-Amz-Signature=abc"
CONFIG = {
    "task": {"name": "digits"},
    "data": {"path": URL},
    "echo": {"variant": "batch", "factor": 2},
    "seed": 7,
}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(tracking, "FINISH_WAIT_S", 240)  # a slow machine imports W&B slowly


def record(folder, fresh_examples, status="reached"):
    """Write the records of a run with these evaluations."""
    run = RunFolder(folder)
    with run.lock():
        run.start(CONFIG)
        for number in fresh_examples:
            run.append_metrics({"fresh_examples": number, "accuracy": number / 1000})
        run.write_summary({"status": status, "fresh_examples": number, "to_target": {"steps": 5}})


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """W&B's files of an interrupted run, and of a sweep of two trials."""
    root = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_SERVICE", raising=False)
        patch.setattr(tracking, "FINISH_WAIT_S", 240)
        patch.setenv("WANDB_DIR", str(root))
        with exported(OFFLINE, root / "run"):
            record(root / "run", [160, 320, 480], status="preempted")
        (root / "sweep").mkdir()
        (root / "sweep" / "design.json").write_text('{"trials": 2}')
        with exported(OFFLINE, root / "sweep"):
            for name in ("0", "1"):
                record(root / "sweep/none/0" / name, [160, 320])
            (root / "sweep/none/0/0.old-1").mkdir()
            Image.new("RGB", (2, 2)).save(root / "sweep" / "fig3.png")
            (root / "sweep" / "outcome.json").write_text('[{"arm": "baseline", "reached": 1}]')
        with exported(OFFLINE, root / "sweep"):  # nothing is new
            pass
        run = RunFolder(root / "run")
        with run.lock():
            run.truncate_metrics(1)  # the checkpoint was written after the first evaluation
        with exported(OFFLINE, root / "run"):
            record(root / "run", [320, 480, 640], status="failed")
    return root


def test_an_offline_trial_is_complete_and_written_once(exports):
    (piece,) = wandb_files.pieces(exports, "none/0/0")
    assert (piece["project"], piece["group"]) == ("adaecho", str(exports / "sweep"))
    assert (piece["name"], piece["exit_code"]) == ("none/0/0", 0)
    assert piece["config"]["seed"] == 7
    assert piece["config"]["data"] == {"path": "https://***@host/a.tar?***"}
    history = [(row["_step"], row["fresh_examples"], row["accuracy"]) for row in piece["history"]]
    assert history == [(160, 160, 0.16), (320, 320, 0.32)]
    assert (piece["summary"]["status"], piece["summary"]["to_target"]) == ("reached", {"steps": 5})
    assert not wandb_files.pieces(exports, "none/0/0.old-1"), "a renamed folder is not a trial"


def test_the_last_piece_of_an_interrupted_run_is_complete_and_has_the_same_id(exports):
    pieces = wandb_files.pieces(exports, "run")
    steps = [[row["_step"] for row in piece["history"]] for piece in pieces]
    assert steps == [[160, 320, 480], [160, 320, 480, 640]]
    assert len({piece["id"] for piece in pieces}) == 1
    assert [piece["exit_code"] for piece in pieces] == [0, 1]
    assert pieces[1]["summary"]["status"] == "failed"


def test_a_sweep_shows_design_outcome_and_figure(exports):
    (piece,) = wandb_files.pieces(exports, "outcome")
    assert (piece["name"], piece["group"]) == ("outcome", str(exports / "sweep"))
    assert piece["config"]["trials"] == 2
    assert piece["summary"]["baseline"] == {"arm": "baseline", "reached": 1}
    assert piece["history"][0]["fig3._type"] == "image-file"


def test_tracking_none_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with exported(TrackingConfig(kind="none"), tmp_path):
        pass


def fake_wandb(folder, monkeypatch, source):
    """Make the mirror's process import this source as W&B."""
    (folder / "fake").mkdir()
    (folder / "fake" / "wandb.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder / "fake"), prepend=os.pathsep)


FAILING = {
    "absent": ("raise ImportError('No module named wandb')", "No module named wandb. The run continues"),
    "raising": (
        "def init(**_): raise RuntimeError('no key\\nmore')\nSettings = dict",
        "no key. The run continues",
    ),
    "dying": ("def init(**_): import os; os._exit(3)\nSettings = dict", "process ended with 3"),
    "hanging": ("import time\nSettings = dict\ndef init(**_): time.sleep(1000)", "not finished in 0.2 s"),
    "real but without an account": (None, "The run continues"),
}


@pytest.mark.parametrize(("source", "says"), FAILING.values(), ids=FAILING)
def test_w_and_b_absent_or_failing_is_one_warning(tmp_path, monkeypatch, capfd, source, says):
    if source is not None:
        fake_wandb(tmp_path, monkeypatch, source)
    if "0.2" in says:
        monkeypatch.setattr(tracking, "FINISH_WAIT_S", 0.2)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "", "NETRC": "/netrc"}.items():
        monkeypatch.setenv(name, f"{tmp_path}{value}")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "design.json").write_text("{}")
    with exported(TrackingConfig(kind="wandb", mode="online"), tmp_path / "sweep"):
        for name in ("0", "1"):
            record(tmp_path / "sweep/none/0" / name, [160])
    error = capfd.readouterr().err
    assert error.count("warning") == error.count("warning: tracking: ") == 1
    assert says in error


SLOW = """
import json, time
from types import SimpleNamespace
Settings = dict
def init(**_):
    def finish(exit_code):
        time.sleep(0.5)
        open("finished", "w").write(str(exit_code))
    def log(line, step):
        with open("sent", "a") as file:
            file.write(json.dumps([step, line["accuracy"]]) + "\\n")
    summary = SimpleNamespace(update=lambda _: None)
    return SimpleNamespace(log=log, summary=summary, starting_step=200, finish=finish)
"""
KILLED = """
import os, signal, sys, time
from pathlib import Path
from adaecho.config.schema import TrackingConfig
from adaecho.records.wandb_mirror import exported
with exported(TrackingConfig(kind="wandb"), Path(sys.argv[1])):
    time.sleep(1)
    assert not (Path(sys.argv[1]) / "finished").exists(), "exported during the run"
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_is_exported_up_to_the_kill(tmp_path, monkeypatch):
    fake_wandb(tmp_path, monkeypatch, SLOW)
    record(tmp_path, [160], status="running")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    file, until = tmp_path / "finished", time.monotonic() + 240
    while not (file.exists() and file.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    assert file.read_text() == "0"


def test_online_every_evaluation_is_sent_once_while_the_run_continues(tmp_path, monkeypatch):
    """The server already has the evaluations before ``starting_step``."""
    fake_wandb(tmp_path, monkeypatch, SLOW)
    with exported(TrackingConfig(kind="wandb", mode="online"), tmp_path):
        record(tmp_path, [160, 320], status="running")
        until = time.monotonic() + 240
        while not (tmp_path / "sent").exists() and time.monotonic() < until:
            time.sleep(0.1)
        assert (tmp_path / "sent").read_text() == "[320, 0.32]\n"
        record(tmp_path, [480])
    assert (tmp_path / "sent").read_text() == "[320, 0.32]\n[480, 0.48]\n"
    assert (tmp_path / "finished").read_text() == "0"
