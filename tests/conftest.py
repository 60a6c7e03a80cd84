"""Fixtures of all tests: composed configs, commands, and a folder for each test."""

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

    # Its handler would keep pytest's replacement of stderr, and close it when Hydra configures logging.
    absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__

# Tests run in parallel, so each uses one thread. torch reads this variable when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests compare runs bit for bit, and sums on a GPU vary. GPU tests run with:
# CUDA_VISIBLE_DEVICES=0 pytest tests/adascale/test_cuda.py tests/echo/batch tests/training/test_devices.py
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# A shell starts background jobs with Ctrl-C ignored, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

Compose = Callable[..., schema.Config]


def pytest_collectstart() -> None:
    """Imported modules are never garbage, and searching them takes long."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run from the last folder of the alphabet to the first: training and search take longest."""
    items.sort(key=lambda item: item.path, reverse=True)


def pytest_collection_finish() -> None:
    """Exclude them from garbage collection, so forks do not copy their pages."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let the process free them at its end."""
    gc.unfreeze()


class HandClock:
    """A ``time.perf_counter`` that the test moves by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """The timer of the tested code."""
    hand = HandClock()
    monkeypatch.setattr(time, "perf_counter", hand)
    return hand


@functools.cache  # composing takes 70 ms
def _composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return schema.to_plain(compose("config", overrides=["tracking=none", *overrides]))


@pytest.fixture(scope="session")
def compose_config() -> Compose:
    """``compose_config("task=digits", "echo=batch")`` returns the validated config of these overrides."""

    def composed(*overrides: str) -> schema.Config:
        return schema.from_plain(copy.deepcopy(_composed(*overrides)))

    return composed


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """``command("adaecho.run", "task=digits")`` returns exit code, standard output and standard error."""

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
    """``refused(show.main, folder, "--number", 1)`` returns the message of a command that exits with 2."""

    def call(main: Callable[[list[str]], object], *arguments: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(one) for one in arguments])
        assert end.value.code == 2
        return capsys.readouterr().err

    return call


@pytest.fixture(autouse=True)
def _temporary_folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep relative paths such as ``runs/`` out of the checkout, and tokens out of the user's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADAECHO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    root = str(Path(__file__).resolve().parent.parent)
    monkeypatch.setenv("PYTHONPATH", root)
    if root not in sys.path:
        monkeypatch.syspath_prepend(root)
