"""The digits, whose steps take seconds while a gate is closed: a run that can't end before it was seen.

The gate is the file that the environment names; without the variable, or once the file is there, the task is
``digits`` as it is.
"""

import os
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

from torch import nn

from adaecho.config.schema import Config
from adaecho.tasks import digits
from adaecho.tasks.base import Batch, LossAndWeight, Task

NAME = __name__  # what to give as task.name
GATE = "ADAECHO_TEST_GATE"
Options = digits.Options

# The first steps end soon, so that there is a checkpoint; a hundred outlast every test's time limit; and
# a signal is heard within a step.
_SLOWER_BY_S, _LONGEST_S = 0.2, 10.0


def build(config: Config, options: digits.Options) -> Task:
    """The digits, paced."""
    task, calls = digits.build(config, options), count(1)

    def loss(model: nn.Module, batch: Batch) -> LossAndWeight:
        _wait_for_gate(min(next(calls) * _SLOWER_BY_S, _LONGEST_S))
        return task.loss(model, batch)

    return replace(task, loss=loss)


def _wait_for_gate(longest_s: float) -> None:
    gate, until = os.environ.get(GATE), time.monotonic() + longest_s
    while gate is not None and not Path(gate).exists() and time.monotonic() < until:
        time.sleep(0.02)
