import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from adaecho.config.schema import TrackingConfig
from adaecho.records import tracking
from adaecho.records.folder import RunFolder
from adaecho.records.tracking import export

sys.path.insert(0, str(Path(__file__).parent))
import wandb_files

OFFLINE = TrackingConfig(kind="wandb", mode="offline")
CONFIG = {"data": {"path": None}, "echo": {"variant": "batch", "factor": 2}, "seed": 7}


@pytest.fixture
def exporter(monkeypatch):
    """An exporter process for one test."""
    one = tracking._Exporter()
    monkeypatch.setattr(tracking, "_exporter", one)
    monkeypatch.setattr(tracking, "FINISH_WAIT_S", 240)  # W&B's import takes a slow machine long
    yield one
    one.finish()


def record(folder, fresh_examples, status="reached"):
    """A piece of a run, up to some evaluations."""
    run = RunFolder(folder)
    with run.lock():
        run.start(CONFIG)
        for number in fresh_examples:
            run.append_metrics({"fresh_examples": number, "accuracy": number / 1000})
        run.write_summary({"status": status, "fresh_examples": number, "to_target": {"steps": 5}})


def wait_until_sent(folder, fresh_examples):
    file = folder / "wandb.json"
    for _ in range(2400):
        state = json.loads(file.read_text()) if file.exists() else {}
        if state.get("fresh_examples") == fresh_examples:
            return
        time.sleep(0.1)
    pytest.fail(f"{folder} was not exported")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """What W&B really leaves of an interrupted run, two trials in different projects, and their sweep."""
    root = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_SERVICE", raising=False)
        patch.setattr(tracking, "_exporter", exporter := tracking._Exporter())
        patch.setattr(tracking, "FINISH_WAIT_S", 240)
        record(root / "run", [160, 320, 480], status="preempted")
        export(OFFLINE, root / "run")
        for name in ("0", "1"):
            record(root / "sweep" / name, [160, 320])
            export(OFFLINE, root / "sweep" / name, group="fig3")
        export(TrackingConfig(kind="wandb", project="other"), root / "sweep" / "1")
        Image.new("RGB", (2, 2)).save(root / "sweep" / "fig3.png")
        (root / "sweep" / "design.json").write_text('{"trials": 2}')
        (root / "sweep" / "outcome.json").write_text('[{"arm": "baseline", "reached": 1}]')
        export(OFFLINE, root / "sweep", group=str(root / "sweep"), name="outcome")
        wait_until_sent(root / "run", 480)
        time.sleep(1.1)  # W&B names the folders of pieces by the second
        run = RunFolder(root / "run")
        with run.lock():
            run.truncate_metrics(1)  # the checkpoint was written after the first evaluation
        record(root / "run", [320, 480, 640], status="failed")
        export(OFFLINE, root / "run")
        exporter.finish()
    return root


def test_an_offline_run_is_read_back_whole(exported):
    (piece,) = wandb_files.pieces(exported / "sweep" / "0")
    assert (piece["project"], piece["group"], piece["name"]) == (
        "adaecho",
        "fig3",
        f"{exported.name}/sweep/0",
    )
    assert {key: piece["config"][key] for key in CONFIG} == CONFIG
    assert [(row["_step"], row["fresh_examples"], row["accuracy"]) for row in piece["history"]] == [
        (160, 160, 0.16),
        (320, 320, 0.32),
    ]
    assert piece["summary"]["status"] == "reached"
    assert piece["summary"]["to_target"] == {"steps": 5}
    assert piece["exit_code"] == 0
    assert json.loads((exported / "sweep" / "0" / "wandb.json").read_text())["id"] == piece["id"]


def test_pieces_of_an_interrupted_run_continue_in_order_and_repeat_nothing(exported):
    pieces = wandb_files.pieces(exported / "run")
    assert [[row["_step"] for row in piece["history"]] for piece in pieces] == [[160, 320, 480], [640]]
    assert len({piece["id"] for piece in pieces}) == 1
    assert [piece["exit_code"] for piece in pieces] == [0, 1]
    assert pieces[1]["summary"]["status"] == "failed"


def test_another_project_is_another_run_and_gets_everything(exported):
    pieces = wandb_files.pieces(exported / "sweep" / "1")
    assert {piece["project"] for piece in pieces} == {"adaecho", "other"}
    assert len({piece["id"] for piece in pieces}) == 2
    assert [len(piece["history"]) for piece in pieces] == [2, 2]


def test_a_sweep_shows_design_outcome_and_figure(exported):
    (piece,) = wandb_files.pieces(exported / "sweep")
    assert (piece["name"], piece["group"]) == ("outcome", str(exported / "sweep"))
    assert piece["config"]["trials"] == 2
    assert piece["summary"]["baseline"] == {"arm": "baseline", "reached": 1}
    assert piece["history"][0]["fig3._type"] == "image-file"
    assert len(list((exported / "sweep").glob("wandb/offline-run-*/files/media/images/fig3*.png"))) == 1


def test_tracking_none_starts_nothing(tmp_path, exporter):
    export(TrackingConfig(kind="none"), tmp_path)
    assert exporter._process is None
    assert os.listdir(tmp_path) == []


def fake_wandb(folder, source):
    (folder / "fake").mkdir()
    (folder / "fake" / "wandb.py").write_text(source)
    return str(folder / "fake")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "raise ImportError('No module named wandb')",
            "warning: tracking: No module named wandb. The run goes on",
        ),
        (
            "def init(**_): raise RuntimeError('no key\\nmore')\nSettings = dict",
            "tracking: no key. The run goes on",
        ),
    ],
)
def test_w_and_b_absent_or_failing_is_one_warning(tmp_path, monkeypatch, capfd, exporter, source, says):
    monkeypatch.setenv("PYTHONPATH", fake_wandb(tmp_path, source), prepend=os.pathsep)
    for name in ("a", "b"):
        record(tmp_path / name, [160])
        export(OFFLINE, tmp_path / name)
        time.sleep(0.5)
    exporter.finish()
    error = capfd.readouterr().err
    assert error.count("warning") == 1
    assert says in error


HANGING = "import time\nSettings = dict\ndef init(**_): time.sleep(1000)"


def test_a_hanging_w_and_b_holds_nothing_up(tmp_path, monkeypatch, capfd, exporter):
    monkeypatch.setenv("PYTHONPATH", fake_wandb(tmp_path, HANGING), prepend=os.pathsep)
    monkeypatch.setattr(tracking, "FINISH_WAIT_S", 0.2)
    record(tmp_path / "run", [160])
    for _ in range(2000):  # far more than the pipe holds
        export(OFFLINE, tmp_path / "run")
    process = exporter._process
    exporter.finish()
    assert process.returncode == -9
    error = capfd.readouterr().err
    assert error.count("does not answer") == 1
    assert error.count("not finished in 0.2 s") == 1


def test_online_without_an_account_is_one_warning(tmp_path, monkeypatch, capfd, exporter):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    record(tmp_path / "run", [160])
    export(TrackingConfig(kind="wandb", mode="online"), tmp_path / "run")
    exporter.finish()
    error = capfd.readouterr().err
    assert error.count("warning") == 1
    assert "warning: tracking" in error
    assert "The run goes on" in error


SLOW = """
import time
from types import SimpleNamespace
Settings = dict
def init(*, dir, **_):
    def finish(exit_code):
        time.sleep(0.5)
        (dir / "finished").write_text(str(exit_code))
    nothing = lambda *_, **__: None
    summary = SimpleNamespace(update=nothing)
    return SimpleNamespace(define_metric=nothing, log=nothing, summary=summary, starting_step=0,
    finish=finish)
"""
EXITS = """
import sys
from pathlib import Path
from adaecho.config.schema import TrackingConfig
from adaecho.records.tracking import export
export(TrackingConfig(kind="wandb"), Path(sys.argv[1]))
"""


KILLED = """
import os, signal, sys, time
from pathlib import Path
from adaecho.config.schema import TrackingConfig
from adaecho.records.folder import RunFolder
from adaecho.records.tracking import export
with RunFolder(Path(sys.argv[1])).lock():
    export(TrackingConfig(kind="wandb"), Path(sys.argv[1]))
    time.sleep(1)
    assert not (Path(sys.argv[1]) / "finished").exists(), "exported while the run was under way"
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_is_exported_up_to_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", fake_wandb(tmp_path, SLOW), prepend=os.pathsep)
    record(tmp_path, [160], status="running")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    wait_until_sent(tmp_path, 160)
    assert (tmp_path / "finished").exists()


def test_the_exit_of_a_process_waits_for_its_exporter(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", fake_wandb(tmp_path, SLOW), prepend=os.pathsep)
    record(tmp_path, [160])
    subprocess.run([sys.executable, "-c", EXITS, str(tmp_path)], check=True)
    assert (tmp_path / "finished").read_text() == "0"
