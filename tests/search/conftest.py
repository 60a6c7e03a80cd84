"""Designs of a few cheap arms, and sweeps whose trials are ``stub.run_trial``."""

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from adaecho.config.schema import to_plain
from adaecho.run import CONF
from adaecho.search import launch as workers
from adaecho.search import report, sweeper
from adaecho.search.arms import build_arms, composer, parse_overrides
from adaecho.search.design import Arm, Design
from adaecho.search.worker import Worker
from tests import forks
from tests.search.stub import TASK, run_trial

Command = Callable[..., Path]
BuildArms = Callable[..., tuple[Arm, ...]]


# Axes of the stub: changes to a task's axes then do not change which stub trials diverge.
STUB = {
    "task.name": TASK,
    "optimizer.learning_rate": "tag(log,interval(0.01,1.0))",
    "optimizer.momentum": "tag(reverse_log,interval(0.5,0.98))",
}


def _of_stub(overrides: Sequence[str]) -> list[str]:
    given = {override.partition("=")[0] for override in overrides}
    return [*overrides, *(f"{key}={value}" for key, value in STUB.items() if key not in given)]


def _composed(overrides: Sequence[str], use: Callable[[Any, Any, list[str]], Any]) -> Any:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        hydra = GlobalHydra.instance().hydra
        config = hydra.compose_config("config", ["tracking=none", *overrides], RunMode.MULTIRUN)
        return use(config, hydra.config_loader, list(config.hydra.overrides.task))


@functools.cache  # composing takes a third of a second
def _arms(*overrides: str, only: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> tuple[Arm, ...]:
    def design(config: Any, loader: Any, arguments: list[str]) -> tuple[Arm, ...]:
        named = only(to_plain(config)["search"]["arms"])
        arms, left_out = build_arms(parse_overrides(arguments, loader), named, composer(loader, config))
        print(*left_out, sep="\n")
        return tuple(arms)

    return tuple(_composed(overrides, design))


@pytest.fixture
def arms_of() -> BuildArms:
    """``arms_of(*overrides)``: the arms of a sweep; ``only`` selects named arms."""
    return _arms


def launch(overrides: Sequence[str]) -> None:
    """Run a sweep with stub trials in ``./sweep``."""
    sweeper.Worker = functools.partial(Worker, runner=run_trial)  # type: ignore[assignment,misc]
    _composed([*_of_stub(overrides), "hydra.sweep.dir=sweep"], sweeper.sweep)


@pytest.fixture
def run_sweep(monkeypatch: pytest.MonkeyPatch) -> Command:
    """``run_sweep("search.trials=2", folder="there")``: run a sweep of stub trials; returns its folder.

    Workers are forked; ``launch`` starts new interpreters, like a user's command. Figures are slow, so they
    are drawn only with ``drawn=True``.
    """
    monkeypatch.setattr(sweeper, "Worker", functools.partial(Worker, runner=run_trial))
    monkeypatch.setattr(workers, "CONTEXT", forks.FORKS)

    def run(*overrides: str, folder: str | None = "sweep", drawn: bool = False) -> Path:
        if not drawn:
            monkeypatch.setattr(report, "draw", lambda *_: [])
        where = [] if folder is None else [f"hydra.sweep.dir={folder}"]
        _composed([*_of_stub(overrides), *where], sweeper.sweep)
        return Path(folder or "runs")

    return run


ONE_ARM = ("search.trials=4", "search.workers=2")
_finished: list[Path] = []


@pytest.fixture
def finished(run_sweep: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, ``./sweep``, of the finished sweep ``ONE_ARM``, which runs once."""
    if not _finished:
        _finished.append(run_sweep(*ONE_ARM, folder=str(tmp_path_factory.mktemp("finished") / "sweep")))
    return Path(shutil.copytree(_finished[0], "sweep"))


@pytest.fixture
def design(arms_of: BuildArms) -> Design:
    """Two arms, two searches of three trials each."""
    return Design(arms_of(*_of_stub(["echo=none,batch"])), seed=0, trials=3, repeats=2, max_diverged=6)
