"""What disks, power cuts and hands do to a run folder: it is noticed, said, and costs as little as can be."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaecho.errors import DiskError, FolderError
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics

FOLDER = Path("run")
RUN = ("target.value=null", "evaluate.every_fresh_examples=64", "checkpoint_every_s=0", "precision=float32")
LAST, PREVIOUS = FOLDER / "checkpoint/last.pt", FOLDER / "checkpoint/previous.pt"
METRICS, CONFIG = FOLDER / "metrics.jsonl", FOLDER / "config.yaml"


@pytest.fixture
def go_on(compose_config: Compose) -> Callable[[], str]:
    """A run that ended at step 12 of 20 and can be continued; returns its status."""
    run_trial(compose_config(*RUN, "max_steps=12"), FOLDER)
    return lambda: str(run_trial(compose_config(*RUN, "max_steps=20"), FOLDER)["status"])


@pytest.fixture
def undisturbed(compose_config: Compose) -> list[dict[str, Any]]:
    run_trial(compose_config(*RUN, "max_steps=20"), Path("undisturbed"))
    return metrics(Path("undisturbed"))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _zero(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1024:1536] = bytes(512)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [_flip, _zero, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"PK"), Path.unlink],
    ids=["one bit", "a zeroed sector", "empty", "garbage", "gone"],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    go_on: Callable[[], str],
    undisturbed: list[dict[str, Any]],
    damage: Callable[[Path], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(LAST)
    was_there = LAST.exists()
    assert go_on() == "budget_spent"
    assert metrics(FOLDER) == undisturbed
    warned = capsys.readouterr().err
    assert ("last.pt: damaged" in warned and "continuing from previous.pt" in warned) == was_there
    assert LAST.with_name("last.pt.damaged").exists() == was_there, "set aside, not written over"


def test_with_both_damaged_nothing_is_begun_or_lost(go_on: Callable[[], str]) -> None:
    _flip(LAST)
    _zero(PREVIOUS)
    before = {path: path.read_bytes() for path in FOLDER.rglob("*.pt")} | {METRICS: METRICS.read_bytes()}
    for _ in range(2):
        with pytest.raises(FolderError, match=r"(?s)last\.pt: damaged.*previous\.pt: damaged.*fresh=true"):
            go_on()
    assert {path: path.read_bytes() for path in before} == before


def test_checkpoints_that_are_gone_are_no_new_start(go_on: Callable[[], str]) -> None:
    LAST.unlink()
    PREVIOUS.unlink()
    with pytest.raises(FolderError, match="it is gone"):
        go_on()
    assert metrics(FOLDER)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda: METRICS.write_text(METRICS.read_text().partition("\n")[0] + "\n"), "1 lines, but"),
        (lambda: METRICS.unlink(), "0 lines, but"),
    ],
    ids=["cut", "gone"],
)
def test_the_metrics_before_the_checkpoint_must_be_there(
    go_on: Callable[[], str], damage: Callable[[], object], named: str
) -> None:
    damage()
    with pytest.raises(FolderError, match=f"(?s){named}.*fresh=true"):
        go_on()


def test_metrics_that_lost_their_end_continue_from_the_checkpoint_that_fits(
    go_on: Callable[[], str], undisturbed: list[dict[str, Any]]
) -> None:
    # The run ended with an evaluation and a checkpoint; the checkpoint before was written without it.
    METRICS.write_bytes(b"".join(METRICS.read_bytes().splitlines(keepends=True)[:-1]))
    assert go_on() == "budget_spent"
    assert metrics(FOLDER) == undisturbed


@pytest.mark.parametrize("blank", [b"", bytes(700)], ids=["empty", "zeros"])
def test_an_empty_config_is_written_anew_where_the_checkpoint_is_this_runs(
    go_on: Callable[[], str], undisturbed: list[dict[str, Any]], blank: bytes
) -> None:
    CONFIG.write_bytes(blank)
    assert go_on() == "budget_spent"
    assert metrics(FOLDER) == undisturbed
    assert "variant: none" in CONFIG.read_text()
    assert not Path("run.old-1").exists()


def test_an_empty_config_alone_is_a_new_run(compose_config: Compose) -> None:
    FOLDER.mkdir()
    CONFIG.touch()
    (FOLDER / "environment.json").touch()
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


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff\xfe", b"[1]"], ids=["empty", "torn", "no text", "a list"]
)
def test_the_environment_is_not_needed_to_go_on(
    go_on: Callable[[], str], undisturbed: list[dict[str, Any]], damage: bytes
) -> None:
    (FOLDER / "environment.json").write_bytes(damage)
    assert go_on() == "budget_spent"
    assert metrics(FOLDER) == undisturbed


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b"a: [", b"data: 3\n", b"- a\n"])
def test_a_config_that_is_no_config_gets_one_message(go_on: Callable[[], str], text: bytes) -> None:
    CONFIG.write_bytes(text)
    with pytest.raises(FolderError, match=r"config\.yaml: damaged"):
        go_on()


def test_records_reach_the_disk_in_an_order_that_a_power_cut_may_stop_anywhere(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file that is renamed into place was synced before, config.yaml ahead of all others."""
    synced: set[str] = set()
    renamed: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def record(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            assert self.name in synced, f"{target.name} got its name before its bytes were on disk"
            synced.discard(self.name)
            renamed.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "replace", rename)
    run_trial(compose_config(*RUN, "max_steps=5"), FOLDER)
    assert renamed[0] == "config.yaml"
    assert {"environment.json", "last.pt", "summary.json"} <= set(renamed)
    assert "metrics.jsonl" in synced


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


@pytest.mark.parametrize("left", [b"", bytes(512)], ids=["empty", "zeros"])
def test_an_empty_summary_is_no_end(
    go_on: Callable[[], str], undisturbed: list[dict[str, Any]], left: bytes
) -> None:
    (FOLDER / "summary.json").write_bytes(left)
    assert go_on() == "budget_spent"
    assert metrics(FOLDER) == undisturbed
