"""The task digits with slow steps while a gate is closed, so that a run cannot end before a test sees it.

The gate is a file that an environment variable names. Without the variable, or once the file exists, steps
are not slowed.
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

NAME = __name__  # a value of task.name
GATE = "ADAECHO_TEST_GATE"
Options = digits.Options

# The first steps are short, so that a checkpoint is written soon; a hundred exceed the time limit of a test.
_SLOWER_BY_S, _LONGEST_S = 0.2, 10.0


def build(config: Config, options: digits.Options) -> Task:
    """The task digits, slowed."""
    task, calls = digits.build(config, options), count(1)

    def loss(model: nn.Module, batch: Batch) -> LossAndWeight:
        _wait_for_gate(min(next(calls) * _SLOWER_BY_S, _LONGEST_S))
        return task.loss(model, batch)

    return replace(task, loss=loss)


def _wait_for_gate(longest_s: float) -> None:
    gate, until = os.environ.get(GATE), time.monotonic() + longest_s
    while gate is not None and not Path(gate).exists() and time.monotonic() < until:
        time.sleep(0.02)
