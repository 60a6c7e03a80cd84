import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image

from adaecho.config.schema import TrackingConfig
from adaecho.errors import FolderError
from adaecho.records import exporter, tracking
from adaecho.records.exporter import Piece
from adaecho.records.folder import RunFolder
from adaecho.records.tracking import exported
from tests.records import wandb_files

OFFLINE = TrackingConfig(kind="wandb", mode="offline")
CONFIG = {"data": {"path": None}, "echo": {"variant": "batch", "factor": 2}, "seed": 7}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(tracking, "FINISH_WAIT_S", 240)  # W&B's import takes a slow machine long


def record(folder, fresh_examples, status="reached"):
    """A piece of a run, up to some evaluations."""
    run = RunFolder(folder)
    with run.lock():
        run.start(CONFIG)
        for number in fresh_examples:
            run.append_metrics({"fresh_examples": number, "accuracy": number / 1000})
        run.write_summary({"status": status, "fresh_examples": number, "to_target": {"steps": 5}})


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """What W&B really leaves of an interrupted run, and of a sweep of two trials in two projects."""
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
            shutil.copytree(root / "sweep/none/0/0", root / "sweep/none/0/0.old-1")
            Image.new("RGB", (2, 2)).save(root / "sweep" / "fig3.png")
            (root / "sweep/page.png").write_bytes(POSTSCRIPT)
            record(root / "mine", [160])  # where links lead to that come with what others sent
            (root / "sweep/none/0/2").symlink_to(root / "mine")
            (root / "sweep/holiday.png").symlink_to(root / "sweep/fig3.png")
            (root / "sweep" / "outcome.json").write_text('[{"arm": "baseline", "reached": 1}]')
        for tracker in (OFFLINE, TrackingConfig(kind="wandb", project="other")):
            with exported(tracker, root / "sweep"):  # the first time there is nothing new
                pass
        run = RunFolder(root / "run")
        with run.lock():
            run.truncate_metrics(1)  # the checkpoint was written after the first evaluation
        with exported(OFFLINE, root / "run"):
            record(root / "run", [320, 480, 640], status="failed")
    return root


def test_an_offline_run_is_read_back_whole(exports):
    piece, _ = wandb_files.pieces(exports, "none/0/0")
    assert (piece["project"], piece["group"]) == ("adaecho", str(exports / "sweep"))
    assert (piece["name"], piece["exit_code"]) == ("none/0/0", 0)
    assert {key: piece["config"][key] for key in CONFIG} == CONFIG
    history = [(row["_step"], row["fresh_examples"], row["accuracy"]) for row in piece["history"]]
    assert history == [(160, 160, 0.16), (320, 320, 0.32)]
    assert (piece["summary"]["status"], piece["summary"]["to_target"]) == ("reached", {"steps": 5})
    assert not wandb_files.pieces(exports, "none/0/0.old-1"), "what was set aside is no trial"


def test_pieces_of_an_interrupted_run_continue_in_order_and_repeat_nothing(exports):
    pieces = wandb_files.pieces(exports, "run")
    assert [[row["_step"] for row in piece["history"]] for piece in pieces] == [[160, 320, 480], [640]]
    assert len({piece["id"] for piece in pieces}) == 1
    assert [piece["exit_code"] for piece in pieces] == [0, 1]
    assert pieces[1]["summary"]["status"] == "failed"


def test_another_project_is_another_run_and_gets_everything(exports):
    pieces = wandb_files.pieces(exports, "none/0/1")
    assert {piece["project"] for piece in pieces} == {"adaecho", "other"}
    assert len({piece["id"] for piece in pieces}) == 2
    assert [len(piece["history"]) for piece in pieces] == [2, 2]


def test_a_copy_of_a_folder_is_another_run(exports, tmp_path):
    """What others sent would name, and change, any run of one's account."""
    where = {"project": "adaecho", "entity": None}
    copy = shutil.copytree(exports / "run", tmp_path / "copy")
    own, other = (exporter._state(folder / "wandb.json", where) for folder in (exports / "run", copy))
    assert own["fresh_examples"] == 640
    assert (other["fresh_examples"], other["as_of"]) == (-1, None)
    assert other["id"] != own["id"]


def test_a_sweep_shows_design_outcome_and_figure(exports):
    piece, _ = wandb_files.pieces(exports, "outcome")
    assert (piece["name"], piece["group"]) == ("outcome", str(exports / "sweep"))
    assert piece["config"]["trials"] == 2
    assert piece["summary"]["baseline"] == {"arm": "baseline", "reached": 1}
    assert piece["history"][0]["fig3._type"] == "image-file"
    assert len(list(exports.glob("wandb/offline-run-*/files/media/images/fig3*.png"))) == 2


def test_a_picture_is_a_png_whatever_its_name(exports):
    """Pillow would have Ghostscript run it."""
    for piece in wandb_files.pieces(exports, "outcome"):
        assert piece["exit_code"] == 0
        assert {key.partition(".")[0] for row in piece["history"] for key in row if "._type" in key} == {
            "fig3"
        }
    assert not list(exports.rglob("media/images/page*"))


def test_nothing_of_a_record_is_an_artifact_to_fetch(tmp_path):
    """W&B would send its key to the host that a received config names."""
    link = "wandb-artifact://http://127.0.0.1:9/e/p/n:v0"
    forged = {"note": link, "task": {"a": [link, {"_type": "artifactVersion", "id": "x"}]}, "steps": 3}
    (tmp_path / "config.yaml").write_text(json.dumps(forged))
    (tmp_path / "summary.json").write_text(json.dumps(forged))
    for read in (exporter._config, exporter._summary):
        found = read(tmp_path)
        assert found["steps"] == 3
        assert found["task"]["a"][1] == {"id": "x"}
        assert "wandb-artifact" not in str(found)


@pytest.mark.parametrize("text", ["!!pairs\n- note: {}\n", "!!omap\n- note: {}\n", "note: !!set {{{}}}\n"])
def test_a_config_of_other_types_is_not_exported(tmp_path, text):
    """PyYAML makes tuples of them, which may hold what W&B fetches."""
    (tmp_path / "config.yaml").write_text(text.format("wandb-artifact://http://127.0.0.1:9/e/p/n:v0"))
    with pytest.raises(ValueError, match="holds a tag"):
        exporter._config(tmp_path)


@pytest.mark.parametrize(("mode", "keys"), [("offline", (None, os.devnull)), ("online", ("k", "mine"))])
def test_an_export_that_sends_nothing_has_no_key(tmp_path, monkeypatch, mode, keys):
    seen = []
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(
        exporter, "_follow", lambda *_: seen.append(tuple(map(os.environ.get, ("WANDB_API_KEY", "NETRC"))))
    )
    for name, value in {
        "WANDB_API_KEY": "k",
        "NETRC": "mine",
        "WANDB_SILENT": "",
        "WANDB_BASE_URL": "",
    }.items():
        monkeypatch.setenv(name, value)
    exporter.main(str(tmp_path), mode, "adaecho")
    assert seen == [keys]


def test_nothing_is_exported_that_a_link_leads_to(exports):
    assert not list(exports.glob("wandb/offline-run-*/files/media/images/holiday*"))
    assert not wandb_files.pieces(exports, "none/0/2")


def test_nothing_of_w_and_b_lies_in_the_folder_of_a_run_or_sweep(exports):
    """`wandb sync` would upload what others put there: their logs name files of one's own to send."""
    assert {path.parent for path in exports.rglob("offline-run-*")} == {exports / "wandb"}


def test_tracking_none_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with exported(TrackingConfig(kind="none"), tmp_path):
        pass


def fake_wandb(folder, monkeypatch, source):
    """What a process of its own imports as W&B."""
    (folder / "fake").mkdir()
    (folder / "fake" / "wandb.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder / "fake"), prepend=os.pathsep)


FAILING = {
    "absent": ("raise ImportError('No module named wandb')", "No module named wandb. The run goes on"),
    "raising": (
        "def init(**_): raise RuntimeError('no key\\nmore')\nSettings = dict",
        "no key. The run goes on",
    ),
    "dying": ("def init(**_): import os; os._exit(3)\nSettings = dict", "its export ended with 3"),
    "hanging": ("import time\nSettings = dict\ndef init(**_): time.sleep(1000)", "not finished in 0.2 s"),
    "real but without an account": (None, "The run goes on"),
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
import time
from types import SimpleNamespace
Settings = dict
def init(**_):
    def finish(exit_code):
        time.sleep(0.5)
        open("finished", "w").write(str(exit_code))
    nothing = lambda *_, **__: None
    summary = SimpleNamespace(update=nothing)
    return SimpleNamespace(define_metric=nothing, log=nothing, summary=summary, starting_step=0,
    finish=finish)
"""
KILLED = """
import os, signal, sys, time
from pathlib import Path
from adaecho.config.schema import TrackingConfig
from adaecho.records.tracking import exported
with exported(TrackingConfig(kind="wandb"), Path(sys.argv[1])):
    time.sleep(1)
    assert not (Path(sys.argv[1]) / "finished").exists(), "exported while the run was under way"
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_is_exported_up_to_there(tmp_path, monkeypatch):
    fake_wandb(tmp_path, monkeypatch, SLOW)
    record(tmp_path, [160], status="running")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    file, until = tmp_path / "finished", time.monotonic() + 240
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert file.read_text() == "0"


LINKED = (
    *("wandb", ".wandb", "wandb.json", "config.yaml", "summary.json", "metrics.jsonl"),
    *("design.json", "outcome.json"),
)


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_with_links_is_no_piece(tmp_path, name):
    record(tmp_path / "sweep/none/0/0", [160])
    mine, link = tmp_path / "mine", tmp_path / "sweep/none/0/0" / name
    mine.write_text("token: secret")
    link.unlink(missing_ok=True)
    link.symlink_to(mine)
    where = {"mode": "offline", "project": "adaecho", "entity": None}
    with pytest.raises(FolderError, match="leads elsewhere by a symbolic link"):
        Piece(link.parent, tmp_path / "sweep", where)


def test_what_a_link_in_a_received_sweep_leads_to_is_neither_changed_nor_sent(tmp_path, capfd):
    sweep, mine = tmp_path / "sweep", tmp_path / "mine"
    for folder in (sweep / "none/0/0", mine):
        record(folder, [160])
    (mine / "debug.log").write_text("precious")
    (sweep / "design.json").write_text("{}")
    for name in (".wandb", "wandb"):
        (sweep / "none/0/0" / name).symlink_to(mine)
    before = sorted(mine.rglob("*"))
    with exported(OFFLINE, sweep):
        pass
    assert sorted(mine.rglob("*")) == before
    assert (mine / "debug.log").read_text() == "precious"
    assert not (mine / "debug.log").is_symlink()
    assert "wandb: leads elsewhere by a symbolic link" in capfd.readouterr().err


def test_the_export_imports_nothing_of_the_current_folder(tmp_path, monkeypatch, capfd):
    """It may be a run's that was received, where a wandb/ is nothing strange."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/__init__.py").write_text("open('imported', 'w').close()")
    with exported(OFFLINE, tmp_path / "run"):
        record(tmp_path / "run", [160])
    assert not (tmp_path / "imported").exists()
    assert "tracking" not in capfd.readouterr().err
