import torch

from adaecho.training.device import Clocks
from tests.conftest import HandClock

CPU = torch.device("cpu")


def test_evaluation_and_checkpoints_are_not_training(clock: HandClock) -> None:
    clocks = Clocks()
    clock.now += 50  # before the start
    clocks.start()
    clock.now += 1
    with clocks.evaluating(CPU):
        clock.now += 10
    clock.now += 2
    with clocks.uncounted(CPU):
        clock.now += 100
    clock.now += 4
    clocks.stop(CPU)
    clock.now += 1000
    assert (clocks.train_time_s, clocks.eval_time_s) == (7, 10)


def test_a_new_piece_goes_on_where_the_last_stood(clock: HandClock) -> None:
    clocks = Clocks(train_time_s=5.0, eval_time_s=3.0)
    clocks.start()
    clock.now += 1
    assert clocks.peek() == 6.0
