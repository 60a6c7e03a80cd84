"""Killed anywhere and run again, a run leaves the metrics that an undisturbed one leaves, also a sleeper."""

import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.errors import ChangedDataError, FolderError
from adaecho.records import lock
from adaecho.tasks import build_task
from adaecho.training import trial
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.forks import FORKS
from tests.helpers import dying, metrics, signal_at, summary
from tests.needs import first_form, needs

RUN = ("max_steps=30", "target.value=null", "evaluate.every_fresh_examples=64", "checkpoint_every_s=0")


def _run_until_killed(plain: dict[str, Any], folder: str, die_at: int) -> None:
    """One piece of a run, in a process of its own; every write to disk and every step is a place to die."""
    from adaecho.training import trainer

    calls = [0]
    for name in ("replace", "fsync", "rename", "write"):
        setattr(os, name, dying(getattr(os, name), die_at, calls))
    trainer.Trainer._step = dying(trainer.Trainer._step, die_at, calls)  # type: ignore[method-assign]
    run_trial(from_plain(plain), Path(folder))


def _piece(config: Config, folder: Path, die_at: int) -> int | None:
    process = FORKS.Process(target=_run_until_killed, args=(to_plain(config), str(folder), die_at))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize(
    "echo",
    first_form(
        ("echo=batch", "echo.factor=1.5"),
        ("echo=example_before_augmentation", "echo.factor=2"),
        also=[("echo=none",), ("echo=example_after_augmentation", "echo.factor=2.5")],
    ),
    ids=lambda overrides: overrides[0],
)
def test_killed_anywhere_it_continues_to_the_same_metrics(
    compose_config: Compose, echo: tuple[str, ...]
) -> None:
    config, undisturbed, folder = compose_config(*RUN, *echo), Path("undisturbed"), Path("killed")
    run_trial(config, undisturbed)
    # Ever later deaths, so that each piece gets past the last one's end and each kind of place has its turn.
    ends = [_piece(config, folder, die_at) for die_at in (1, 2, 4, 9, 20, 41, 83, 10**9)]
    assert ends.count(-signal.SIGKILL) >= 5
    assert summary(folder)["status"] == "budget_spent"
    assert metrics(folder) == metrics(undisturbed)
    assert len(metrics(folder)) > 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_ends_the_step_and_leaves_a_checkpoint(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    signal_at(monkeypatch, 20, number)
    ended = run_trial(compose_config(*RUN[:-1]), Path("signalled"))
    assert (ended["status"], ended["steps"], ended["signal"]) == ("preempted", 20, number.name)
    assert Path("signalled/checkpoint/last.pt").exists()


_SOON_HARM = ("task=digits_mlp", "evaluate.every_fresh_examples=160", "optimizer.learning_rate=1")
# Overrides, the steps of the first piece and of the whole, and what of the summary must be the same too.
IN_PIECES: dict[str, tuple[tuple[str, ...], int, int, tuple[str, ...]]] = {
    "a larger budget": ((), 30, 60, ("steps", "fresh_examples")),
    "adam": (("optimizer.name=adam", "optimizer.learning_rate=0.001"), 13, 30, ("steps",)),
    "an average": (("echo.shuffle_buffer=64", "optimizer.ema_decay=0.9"), 13, 30, ("steps",)),
    "adascale": (
        ("adascale=on", "echo=example_before_augmentation", "echo.factor=2"), 11, 24,
        ("gain", "scale_invariant_steps", "fresh_scale_invariant_steps"),
    ),
    "adascale of one gradient": (
        ("adascale=on", "echo=batch", "echo.factor=2", "adascale.num_gradients_to_accumulate=1",
         "adascale.scale=4"), 11, 24,
        ("gain", "scale_invariant_steps", "fresh_scale_invariant_steps"),
    ),
    # At step 22, of the first piece.
    "best before the end": ((*_SOON_HARM, "checkpoint_every_s=0"), 25, 40, ("steps",)),
    "boxes": (
        ("task=scenes", "task.training_scenes=64", "data.validation_examples=16", "batch_size=16",
         "echo.shuffle_buffer=32"), 5, 8, ("steps",),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "first", "last", "same"), IN_PIECES.values(), ids=IN_PIECES)
def test_a_run_in_two_pieces_is_the_whole_run(
    compose_config: Compose,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    first: int,
    last: int,
    same: tuple[str, ...],
) -> None:
    """Evaluations, and weights at the end and at the best of them."""
    common = ("target.value=null", "evaluate.every_fresh_examples=64", "precision=float32", *overrides)
    config = compose_config(*common, f"max_steps={last}")
    run_trial(config, Path("whole"))
    with monkeypatch.context() as patched:
        signal_at(patched, first)
        piece = config if overrides else compose_config(*common, f"max_steps={first}")
        ended = run_trial(piece, Path("pieces"))
    assert ended["status"] == ("preempted" if overrides else "budget_spent")
    run_trial(config, Path("pieces"))
    assert metrics("pieces") == metrics("whole")
    assert len(metrics("whole")) > 1
    assert {key: summary("pieces")[key] for key in same} == {key: summary("whole")[key] for key in same}
    for name in ("final", "best"):
        pieces, whole = (Path(folder, f"model/{name}.safetensors") for folder in ("pieces", "whole"))
        assert pieces.read_bytes() == whole.read_bytes()


FOLDER = Path("run")
ASLEEP = ("target.value=null", "evaluate.every_fresh_examples=64", "checkpoint_every_s=0")


def _sleeper(plain: dict[str, Any], sleep_at: int) -> None:
    """A run that falls asleep right before a write to disk; exits with 3 if it is refused when it wakes."""
    from adaecho.records import files

    calls = [0]
    for module, name in ((os, "write"), (os, "fsync"), (os, "truncate"), (files.Path, "replace")):
        setattr(module, name, dying(getattr(module, name), sleep_at, calls, signal.SIGSTOP))
    try:
        run_trial(from_plain(plain), FOLDER)
    except FolderError:
        os._exit(3)
    os._exit(0)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _records() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(FOLDER.rglob("*")) if path.is_file()}


@needs("/proc", present=Path("/proc/self/stat").exists(), remedy="nothing else tells that a process sleeps")
@pytest.mark.parametrize("sleep_at", [9, 41, 43, 45, 47, 49])
def test_a_woken_run_leaves_its_successor_alone(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, sleep_at: int
) -> None:
    sleeper = FORKS.Process(target=_sleeper, args=(to_plain(compose_config(*ASLEEP)), sleep_at))
    sleeper.start()
    try:
        while _state(sleeper.pid) != "T":
            assert sleeper.is_alive(), "it ended before it fell asleep"
            time.sleep(0.01)
        with monkeypatch.context() as elsewhere:  # another host, where that process can't be looked up
            elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
            elsewhere.setattr(lock, "STALE_AFTER_S", 0.0)
            other = (*ASLEEP, "optimizer.learning_rate=0.001")
            run_trial(compose_config(*other, "max_steps=6", "fresh=true"), FOLDER)
        before = _records()
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)
    sleeper.join()
    assert sleeper.exitcode == 3
    after = _records()
    # Caught while it made room for its checkpoint, it may have renamed one of the new run's, but no more.
    assert {name: data for name, data in after.items() if "/checkpoint/" not in name} == {
        name: data for name, data in before.items() if "/checkpoint/" not in name
    }
    assert set(after.values()) <= set(before.values()), "nothing of the woken run's is there"
    run_trial(compose_config(*other, "max_steps=12"), FOLDER)
    run_trial(compose_config(*other, "max_steps=12"), Path("undisturbed"))
    assert metrics(FOLDER) == metrics(Path("undisturbed"))


class _Told:
    """Rows in turn, whose position is text; ``seen`` what it was given back."""

    url = "https://en.example.org/w/index.php?title=P9&oldid=9000"

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays, self.row, self.seen = arrays, 0, list[str]()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self.row += 1
            row = {key: np.asarray(value[self.row % 1000]) for key, value in self.arrays.items()}
            yield {**row, "number": self.row}

    def state_dict(self) -> dict[str, Any]:
        return {"rest": f"{self.row} of {self.url}, as of today"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(state["rest"])
        self.row = int(state["rest"].split()[0])


def test_texts_of_a_source_come_back_as_they_were_and_bad_examples_without_secrets(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Urls in what it tells of its position, in an example's error and in the task's fingerprint."""
    sources: list[_Told] = []
    fingerprint = {"captions": "https://h/c.csv?v=3"}

    def decode(row: dict[str, Any]) -> dict[str, Any]:
        if row.pop("number") == 41:
            raise ValueError("no picture: https://h/7.jpg?w=640: number 41")
        return row

    def build(config: Config) -> Any:
        task = build_task(config)
        sources.append(_Told(task.source))
        return replace(task, source=sources[-1], decode=decode, fingerprint=fingerprint)

    monkeypatch.setattr(trial, "build_task", build)
    bad = ("echo=none", "data.max_bad_examples=1", "target.value=null")
    run_trial(compose_config(*bad, "max_fresh_examples=640"), Path("whole"))
    for budget in (320, 448, 640):
        run_trial(compose_config(*bad, f"max_fresh_examples={budget}"), Path("run"))
    assert metrics("run") == metrics("whole")
    assert len(sources[-1].seen) == 1
    assert re.fullmatch(rf"\d+ of {re.escape(_Told.url)}, as of today", sources[-1].seen[0])
    kept = Path("run/checkpoint/last.pt").read_bytes()
    assert b"h/7.jpg?***" in kept
    assert b"w=640" not in kept
    assert b"v=3" not in kept
    fingerprint["captions"] = "https://h/c.csv?v=4"
    with pytest.raises(ChangedDataError, match=r"captions \(https://h/c\.csv\?\*\*\* \(sha256 \w{8}\)\)"):
        run_trial(compose_config(*bad, "max_fresh_examples=960"), Path("run"))


def test_a_loss_may_draw_from_any_global_generator(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary mixup, say: a run's seed is theirs, and they go on where the run does."""

    def build(config: Config) -> Any:
        task = build_task(config)

        def loss(model: Any, batch: Any) -> Any:
            value, weight = task.loss(model, batch)
            return value * (np.random.beta(0.4, 0.4) + random.random() + np.random.normal()), weight

        return replace(task, loss=loss)

    monkeypatch.setattr(trial, "build_task", build)
    run = ("echo.shuffle_buffer=8", "target.value=null", "evaluate.every_fresh_examples=64")
    for folder, budgets in {"whole": (320,), "again": (320,), "run": (128, 192, 320)}.items():
        random.seed()
        np.random.seed()
        for budget in budgets:
            run_trial(compose_config(*run, f"max_fresh_examples={budget}"), Path(folder))
    assert metrics("run") == metrics("whole") == metrics("again") != []
