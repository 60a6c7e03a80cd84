"""What a trial leaves in its worker's memory: nothing that is still there at the next one."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaecho.config.schema import Config
from adaecho.search.design import Design, record_design
from adaecho.search.worker import Worker
from tests.search import stub
from tests.search.conftest import STUB, BuildArms

_left: list["weakref.ref[_DataSet]"] = []
_alive: list[int] = []  # of the trials before, at the begin of each


class _DataSet:
    """Part of a circle, as a trainer is with its callbacks."""

    def __init__(self) -> None:
        self.user = self


def run_trial(config: Config, folder: Path, overrides: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    _alive.append(sum(each() is not None for each in _left))
    _left.append(weakref.ref(_DataSet()))
    return stub.run_trial(config, folder, overrides, **more)


def test_data_of_a_trial_is_gone_when_the_next_begins(arms_of: BuildArms, tmp_path: Path) -> None:
    arms = arms_of("echo=none", *(f"{key}={value}" for key, value in STUB.items()))
    record_design(Design(arms, seed=0, trials=3, repeats=1, max_diverged=3), tmp_path)
    gc.disable()
    try:
        Worker(str(tmp_path), runner=f"{__name__}:run_trial", typed=(stub.TASK,))()
    finally:
        gc.enable()
    assert len(_alive) >= 3
    assert not any(_alive)
