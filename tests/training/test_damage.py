"""What disks, power cuts and hands do to a run folder: it is noticed, said, and costs as little as can be."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho.config.schema import to_plain
from adaecho.errors import DiskError, FolderError
from adaecho.records.folder import RunFolder
from adaecho.training import checkpoint
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics

FOLDER = Path("run")
RUN = ("target.value=null", "evaluate.every_fresh_examples=64", "checkpoint_every_s=0", "precision=float32")
LAST, PREVIOUS = FOLDER / "checkpoint/last.pt", FOLDER / "checkpoint/previous.pt"
METRICS, CONFIG = FOLDER / "metrics.jsonl", FOLDER / "config.yaml"
SUMMARY, ENVIRONMENT = FOLDER / "summary.json", FOLDER / "environment.json"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``run`` ended at step 12 of 20, and ``undisturbed`` is the whole of it; trained once."""
    return tmp_path_factory.mktemp("ended")


@pytest.fixture
def go_on(compose_config: Compose, ended: Path) -> Callable[[], str]:
    """Continues the run; returns its status."""
    for name, steps in (("run", 12), ("undisturbed", 20)):
        if not (ended / name).exists():
            run_trial(compose_config(*RUN, f"max_steps={steps}"), ended / name)
    shutil.copytree(ended / "run", FOLDER)
    return lambda: str(run_trial(compose_config(*RUN, "max_steps=20"), FOLDER)["status"])


@pytest.fixture
def undisturbed(go_on: Callable[[], str], ended: Path) -> list[dict[str, Any]]:
    del go_on  # which trains it
    return metrics(ended / "undisturbed")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _zero(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:1024] + bytes(512) + data[1536:])


def _first_lines(number: int) -> None:
    METRICS.write_bytes(b"".join(METRICS.read_bytes().splitlines(keepends=True)[:number]))


def _unlink_both() -> None:
    LAST.unlink()
    PREVIOUS.unlink()


def _damage_both() -> None:
    _flip(LAST)
    _zero(PREVIOUS)


Faults = dict[str, tuple[Callable[[], object], str]]
_WARNED = "(?s)last.pt: damaged.*continuing from previous.pt"
# What is mended or not needed: the fault, and what is said of it.
MENDED: Faults = {
    "checkpoint, one bit": (lambda: _flip(LAST), _WARNED),
    "checkpoint, a zeroed sector": (lambda: _zero(LAST), _WARNED),
    "checkpoint, empty": (lambda: LAST.write_bytes(b""), _WARNED),
    "checkpoint, garbage": (lambda: LAST.write_bytes(b"PK"), _WARNED),
    "checkpoint, gone": (LAST.unlink, ""),
    # The run ended with an evaluation and a checkpoint; the checkpoint before was written without it.
    "metrics, without the last line": (lambda: _first_lines(-1), "continuing from previous.pt"),
    "config, empty": (lambda: CONFIG.write_bytes(b""), ""),
    "config, zeros": (lambda: CONFIG.write_bytes(bytes(700)), ""),
    "summary, empty": (lambda: SUMMARY.write_bytes(b""), ""),
    "summary, zeros": (lambda: SUMMARY.write_bytes(bytes(512)), ""),
    "environment, empty": (lambda: ENVIRONMENT.write_bytes(b""), "environment.json is damaged"),
    "environment, torn": (lambda: ENVIRONMENT.write_bytes(b"{"), "environment.json is damaged"),
    "environment, no text": (lambda: ENVIRONMENT.write_bytes(b"\xff\xfe"), "environment.json is damaged"),
    "environment, a list": (lambda: ENVIRONMENT.write_bytes(b"[1]"), "environment.json is damaged"),
}
REFUSED: Faults = {
    "both checkpoints": (_damage_both, r"(?s)last\.pt: damaged.*previous\.pt: damaged.*fresh=true"),
    "checkpoints, gone": (_unlink_both, "it is gone"),
    "metrics, cut": (lambda: _first_lines(1), "(?s)1 lines, but.*fresh=true"),
    "metrics, gone": (METRICS.unlink, "(?s)0 lines, but.*fresh=true"),
    "summary, a list": (lambda: SUMMARY.write_bytes(b"[]"), r"summary\.json"),
    "summary, no status": (lambda: SUMMARY.write_bytes(b"{}"), r"summary\.json"),
    "config, no text": (lambda: CONFIG.write_bytes(b"\xff\xfe\x00"), r"config\.yaml: damaged"),
    "config, torn": (lambda: CONFIG.write_bytes(b"a: ["), r"config\.yaml: damaged"),
    "config, another shape": (lambda: CONFIG.write_bytes(b"data: 3\n"), r"config\.yaml: damaged"),
    "config, a list": (lambda: CONFIG.write_bytes(b"- a\n"), r"config\.yaml: damaged"),
}


@pytest.mark.parametrize(("fault", "says"), MENDED.values(), ids=MENDED)
def test_a_run_goes_on_as_if_nothing_had_been(
    go_on: Callable[[], str],
    undisturbed: list[dict[str, Any]],
    fault: Callable[[], object],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault()
    assert go_on() == "budget_spent"
    assert metrics(FOLDER) == undisturbed
    warned = capsys.readouterr().err
    assert re.search(says, warned)
    assert LAST.with_name("last.pt.damaged").exists() == ("continuing from previous" in warned)
    assert "variant: none" in CONFIG.read_text()
    assert not Path("run.old-1").exists()


@pytest.mark.parametrize(("fault", "says"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_continued_is_told_and_nothing_is_begun_or_lost(
    go_on: Callable[[], str], fault: Callable[[], object], says: str
) -> None:
    fault()
    told = {SUMMARY, ENVIRONMENT, CONFIG, FOLDER / "traceback.txt"}
    before = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file() and path not in told}
    for _ in range(2):
        with pytest.raises(FolderError, match=says):
            go_on()
    assert {path: path.read_bytes() for path in before} == before


def test_an_empty_config_alone_is_a_new_run(compose_config: Compose) -> None:
    FOLDER.mkdir()
    CONFIG.touch()
    ENVIRONMENT.touch()
    assert run_trial(compose_config(*RUN, "max_steps=3"), FOLDER)["steps"] == 3
    assert not Path("run.old-1").exists()


def test_an_empty_config_without_a_fitting_checkpoint_moves_the_folder_aside(
    go_on: Callable[[], str], undisturbed: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    CONFIG.write_bytes(b"")
    LAST.unlink()
    _flip(PREVIOUS)
    kept = METRICS.read_bytes()
    assert go_on() == "budget_spent"
    assert "config.yaml is empty" in (warned := capsys.readouterr().err)
    assert "run.old-1" in warned
    assert (Path("run.old-1") / "metrics.jsonl").read_bytes() == kept
    assert metrics(FOLDER) == undisturbed


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced, and what is renamed into place, which was synced before."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def record(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            assert self.name in events, f"{target.name} got its name before its bytes were on disk"
            events.append(f"rename {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "replace", rename)
    return events


def test_records_reach_the_disk_in_an_order_that_a_power_cut_may_stop_anywhere(
    compose_config: Compose, on_disk: list[str]
) -> None:
    run_trial(compose_config(*RUN, "max_steps=5"), FOLDER)
    renamed = [event for event in on_disk if event.startswith("rename ")]
    assert renamed[0] == "rename config.yaml"
    assert {"rename environment.json", "rename last.pt", "rename summary.json"} <= set(renamed)
    assert "metrics.jsonl" in on_disk


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_refuses_to_cut_the_metrics_costs_no_checkpoint(
    go_on: Callable[[], str], undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    before = LAST.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "truncate", refuses)
        with pytest.raises(DiskError, match=r"metrics\.jsonl"):
            go_on()
    assert LAST.read_bytes() == before
    assert not list(LAST.parent.glob("*.damaged"))
    assert go_on() == "budget_spent"
    assert metrics(FOLDER) == undisturbed


def test_a_finished_run_where_nothing_can_be_written_gives_its_summary(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_config(*RUN, "max_steps=2")
    finished = run_trial(config, FOLDER)
    real = os.open

    def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    assert run_trial(config, FOLDER) == finished
    for other in (["max_steps=3"], ["max_steps=2", "seed=1"], ["max_steps=2", "fresh=true"]):
        with pytest.raises(DiskError, match="can't be written"):
            run_trial(compose_config(*RUN, *other), FOLDER)


@pytest.fixture
def run(compose_config: Compose, tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        folder.start(to_plain(compose_config()))
        yield folder


def _states(run: RunFolder) -> list[dict[str, Any]]:
    return [checkpoint.load(run, path) for path in run.checkpoints()]


def _save(run: RunFolder, steps: int, **more: Any) -> None:
    for step in range(steps):
        checkpoint.save(run, {"progress": {"steps": step}, **more})


def test_the_last_two_are_kept_the_last_one_first(run: RunFolder) -> None:
    assert run.checkpoints() == []
    for step in range(3):
        checkpoint.save(run, {"progress": step, "weights": torch.full((2,), float(step))})
    assert [state["progress"] for state in _states(run)] == [2, 1]
    assert torch.equal(_states(run)[0]["weights"], torch.full((2,), 2.0))
    assert sorted(path.name for path in run.checkpoint_dir.iterdir()) == [LAST.name, PREVIOUS.name]
    # The seal is the comment of an archive that torch reads without us.
    assert torch.load(run.checkpoint_dir / LAST.name, weights_only=True)["progress"] == 2


def test_every_flipped_bit_is_found(run: RunFolder) -> None:
    _save(run, 1, weights=torch.arange(40.0))
    path = run.checkpoint_dir / LAST.name
    whole = path.read_bytes()
    for position in range(0, len(whole) * 8, 13):  # each of the eight bits of a byte has its turn
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(FolderError, match=r"last\.pt: (damaged|of another run)"):
            checkpoint.load(run, path)
    path.write_bytes(whole)
    assert checkpoint.load(run, path)["progress"] == {"steps": 0}


def test_every_zeroed_sector_and_every_cut_is_found(run: RunFolder) -> None:
    _save(run, 1, weights=torch.arange(2000.0))
    path = run.checkpoint_dir / LAST.name
    whole = path.read_bytes()
    assert len(whole) > 8000
    for start in range(0, len(whole), 512):
        sector = whole[start : start + 512]
        for damaged in (whole[:start] + bytes(len(sector)) + whole[start + 512 :], whole[:start]):
            if damaged == whole:  # a sector of zeros
                continue
            path.write_bytes(damaged)
            with pytest.raises(FolderError, match=r"last\.pt: damaged"):
                checkpoint.load(run, path)


def test_garbage_and_a_checkpoint_of_another_run_are_named(run: RunFolder, compose_config: Compose) -> None:
    _save(run, 1)
    other = RunFolder(run.path.with_name("other"))
    with other.lock():
        other.start(to_plain(compose_config("seed=1")))
    theirs = (run.checkpoint_dir / LAST.name).read_bytes()
    path = other.checkpoint_dir / LAST.name
    for garbage in (b"no checkpoint", b"PK\3\4" + bytes(100), b"\x80\2}q\0.", bytes(4096), theirs):
        path.write_bytes(garbage)
        says = "of another run" if garbage == theirs else "damaged"
        with pytest.raises(FolderError, match=rf"last\.pt: {says}"):
            checkpoint.load(other, path)


def test_a_full_disk_leaves_the_earlier_checkpoint(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(run, {"progress": 0})

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(FolderError, match="the disk is full"):
        checkpoint.save(run, {"progress": 1})
    assert [state["progress"] for state in _states(run)] == [0]
    assert [path.name for path in run.checkpoint_dir.iterdir()] == [LAST.name]


def test_what_a_checkpoint_relies_on_reaches_the_disk_before_it(run: RunFolder, on_disk: list[str]) -> None:
    run.append_metrics({"fresh_examples": 160})
    _save(run, 1)
    at = on_disk.index("rename last.pt")
    assert on_disk.index("metrics.jsonl") < at
    assert on_disk[at - 1].startswith(".last.pt.")
    assert on_disk[at + 1] == "checkpoint", "the rename itself is made durable"
