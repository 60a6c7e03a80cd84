import time

import pytest
import torch

from adaecho.training.clock import Clocks

CPU = torch.device("cpu")


class _Host:
    """A clock that moves only when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> _Host:
    clock = _Host()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_evaluation_and_checkpoints_are_not_training(host: _Host) -> None:
    clocks = Clocks()
    host.now += 50  # before the start
    clocks.start()
    host.now += 1
    with clocks.evaluating(CPU):
        host.now += 10
    host.now += 2
    with clocks.uncounted(CPU):
        host.now += 100
    host.now += 4
    clocks.stop(CPU)
    host.now += 1000
    assert (clocks.train_time_s, clocks.eval_time_s) == (7, 10)


def test_a_new_piece_goes_on_where_the_last_stood(host: _Host) -> None:
    clocks = Clocks(train_time_s=5.0, eval_time_s=3.0)
    clocks.start()
    host.now += 1
    assert clocks.read(CPU) == 6.0
    assert clocks.peek() == 6.0
