"""What every test shares: composed configs, small and deterministic."""

import copy
import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from adaecho.config import schema
from adaecho.run import CONF

with suppress(ImportError):
    from absl import logging as absl_logging  # which Grain imports

    # Its handler would keep what pytest has in the place of stderr when it is made, and close that once Hydra
    # sets up logging anew: all later tests of the process would fail.
    absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__

# Several tests at a time share the processors: one thread for each, and for the processes it starts. Before
# torch is imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Runs of tests are compared bit by bit, and the sums of a GPU don't come out alike twice. Its own tests:
# CUDA_VISIBLE_DEVICES=0 pytest tests/adascale/test_cuda.py tests/echo/batch tests/training/test_devices.py
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# A shell starts what goes to the background with Ctrl-C ignored, which all that tests start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

Compose = Callable[..., schema.Config]


def pytest_collectstart() -> None:
    """What is imported stays: to look for garbage in it takes as long as many a test."""
    gc.disable()


# Files whose tests take longest, as --durations=0 told: none of them may begin when all others have ended.
LONGEST = (
    "search/test_real_slurm.py", "echo/behaviour/test_processes.py",
    "echo/behaviour/test_loops_around_loaders.py", "training/test_ranks.py", "search/test_sweep.py",
    "search/test_arms.py", "training/test_torchrun.py", "echo/test_oracle.py", "test_types.py",
    "test_run.py", "test_examples.py", "faults/test_campaign.py", "training/test_resume.py",
    "test_packaging.py", "tasks/test_detection_tasks.py", "echo/behaviour/test_around_data_loaders.py",
    "echo/behaviour/test_interrupts.py", "datasets/test_tokens.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first, then from the last folder of the alphabet to the first."""
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: item.path, reverse=True)
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_collection_finish() -> None:
    """It is passed over from here on, nor do forks copy it."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """At its end a process lets go of it as ever."""
    gc.unfreeze()


class HandClock:
    """``time.perf_counter`` that moves only when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """What the tested code reads the time from."""
    hand = HandClock()
    monkeypatch.setattr(time, "perf_counter", hand)
    return hand


@functools.cache  # composing takes a fifteenth of a second, and tests of one file share their overrides
def _composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return schema.to_plain(compose("config", overrides=["tracking=none", *overrides]))


@pytest.fixture(scope="session")
def compose_config() -> Compose:
    """``compose_config("task=digits", "echo=batch")`` is the validated config of that command, untracked."""

    def composed(*overrides: str) -> schema.Config:
        return schema.from_plain(copy.deepcopy(_composed(*overrides)))

    return composed


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """``command("adaecho.run", "task=digits")`` typed here: exit code, standard output and error."""

    def typed(module: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"python -m {module}", *arguments])
        code = 0
        try:
            import_module({"adaecho.headroom": "adaecho.headroom.__main__"}.get(module, module)).cli()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capfd.readouterr()

    return typed


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """``refused(show.main, folder, "--number", 1)``: what a command says that ends with 2."""

    def call(main: Callable[[list[str]], object], *arguments: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(one) for one in arguments])
        assert end.value.code == 2
        return capsys.readouterr().err

    return call


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths such as ``runs/`` never land in the checkout, nor tokens in the user's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADAECHO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    root = str(Path(__file__).resolve().parent.parent)
    monkeypatch.setenv("PYTHONPATH", root)
    if root not in sys.path:
        monkeypatch.syspath_prepend(root)
