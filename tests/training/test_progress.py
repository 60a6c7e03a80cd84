"""Schedules, targets, budgets, timers and the progress log."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from adaecho.config.schema import Config, ScheduleConfig, check_schedule
from adaecho.errors import ConfigError
from adaecho.training import progress
from adaecho.training.device import Clocks
from adaecho.training.progress import ProgressLog, budget_spent, is_better, meets
from adaecho.training.schedule import Schedule
from adaecho.training.trial import run_trial
from tests.conftest import Compose, HandClock
from tests.helpers import metrics


def _rates(config: ScheduleConfig, positions: range, steps_per_epoch: float | None = None) -> list[float]:
    schedule = Schedule(config, 1.0, steps_per_epoch)
    return [schedule.rate(position) for position in positions]


DECAY = {"shape": "linear_decay", "decay_steps": 100, "decay_factor": 100}


def test_linear_decay_by_100_over_100_steps_then_flat_and_a_warmup_rises_to_it() -> None:
    schedule = Schedule(ScheduleConfig(**DECAY), 1.0)
    rates = [schedule.rate(step) for step in (0, 25, 50, 100, 101, 10**6)]
    assert rates == pytest.approx([1.0, 0.7525, 0.505, 0.01, 0.01, 0.01], rel=1e-12)
    warm = _rates(ScheduleConfig(**DECAY, warmup_steps=4), range(6))
    ratios = [one / other for one, other in zip(warm, _rates(ScheduleConfig(**DECAY), range(6)), strict=True)]
    assert ratios == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_drops_divide_at_the_first_drop_and_after_the_gap() -> None:
    schedule = ScheduleConfig(shape="step_decay", first_milestone_steps=3, milestone_gap_steps=2)
    assert _rates(schedule, range(7)) == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    once = ScheduleConfig(shape="step_decay", first_milestone_steps=3, milestone_factor=2)
    assert _rates(once, range(7)) == pytest.approx([1, 1, 1, 0.5, 0.5, 0.5, 0.5])


def test_cosine_with_warmup_is_the_product_of_torchs_own() -> None:
    def of_torch(make: Any, **settings: float) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler, rates = make(optimizer, **settings), []
        for _ in range(40):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return rates

    cosine = of_torch(CosineAnnealingLR, T_max=40, eta_min=0.05)
    warmup = of_torch(LinearLR, start_factor=1 / 8, total_iters=7)
    config = ScheduleConfig(shape="cosine", decay_steps=40, decay_factor=20, warmup_steps=8)
    expected = [one * other for one, other in zip(cosine, warmup, strict=True)]
    assert _rates(config, range(40)) == pytest.approx(expected, rel=1e-9)
    assert _rates(config, range(40, 43)) == pytest.approx([0.05] * 3)
    with pytest.raises(ConfigError, match=r"schedule\.shape=cosine needs a positive number of steps"):
        check_schedule(ScheduleConfig(shape="cosine"))


def test_durations_in_epochs_need_the_length_of_an_epoch() -> None:
    drops = {"shape": "step_decay", "milestone_factor": 10}
    in_epochs = ScheduleConfig(**drops, warmup_epochs=0.5, first_milestone_epochs=2, milestone_gap_epochs=1.5)
    in_steps = ScheduleConfig(**drops, warmup_steps=2, first_milestone_steps=8, milestone_gap_steps=6)
    assert _rates(in_epochs, range(20), steps_per_epoch=4) == _rates(in_steps, range(20))
    decay = ScheduleConfig(shape="linear_decay", decay_epochs=2.5)
    in_steps = ScheduleConfig(shape="linear_decay", decay_steps=25)
    assert _rates(decay, range(30), 10) == _rates(in_steps, range(30))
    # A warm-up of a fraction of steps never exceeds the peak.
    rates = _rates(ScheduleConfig(warmup_epochs=1), range(4), steps_per_epoch=2.5)
    assert rates == pytest.approx([0.4, 0.8, 1.0, 1.0])
    with pytest.raises(ConfigError, match=r"schedule\.warmup_epochs=3: .* set schedule\.warmup_steps"):
        Schedule(ScheduleConfig(warmup_epochs=3), 1.0)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("direction", "value", "target", "expected"),
    [
        ("max", 0.97, 0.97, True),
        ("max", 0.9699, 0.97, False),
        ("min", 3.9, 3.9, True),
        ("min", 3.91, 3.9, False),
        ("max", 1.0, None, False),
        ("max", float("nan"), 0.5, False),
        ("min", float("nan"), 0.5, False),
    ],
)
def test_a_target_is_met_at_its_exact_value(
    direction: Any, value: float, target: float, expected: bool
) -> None:
    assert meets(direction, value, target) is expected


def test_better_is_strict_and_depends_on_the_direction() -> None:
    better = [is_better("max", 0.5, 0.4), is_better("max", 0.4, 0.4), is_better("min", 0.4, 0.5)]
    assert better == [True, False, True]


@pytest.mark.parametrize(
    ("budget", "steps", "ahead", "seconds", "expected"),
    [
        ({}, 10**9, 10**9, 1e9, False),
        ({"max_steps": 10}, 9, 0, 0.0, False),
        ({"max_steps": 10}, 10, 0, 0.0, True),
        ({"max_fresh_examples": 128}, 1, 128, 0.0, False),  # the batch and its repeats still fit
        ({"max_fresh_examples": 128}, 1, 129, 0.0, True),
        ({"max_train_time_s": 2.0}, 1, 1, 1.9, False),
        ({"max_train_time_s": 2.0}, 1, 1, 2.0, True),
    ],
    ids=str,
)
def test_a_budget_is_spent_when_one_more_batch_would_exceed_it(
    budget: dict[str, Any], steps: int, ahead: int, seconds: float, expected: bool
) -> None:
    config = Config(**budget)
    assert budget_spent(config, steps=steps, next_fresh_examples=ahead, train_time_s=seconds) is expected


def test_training_time_excludes_evaluation_and_checkpoints(clock: HandClock) -> None:
    clocks = Clocks(train_time_s=5.0, eval_time_s=3.0)
    clock.now += 50  # not started
    clocks.start()
    clock.now += 1
    assert clocks.peek() == 6.0
    with clocks.evaluating(CPU):
        clock.now += 10
    clock.now += 2
    with clocks.uncounted(CPU):
        clock.now += 100
    clock.now += 4
    clocks.stop(CPU)
    clock.now += 1000
    assert (clocks.train_time_s, clocks.eval_time_s) == (5 + 7, 3 + 10)


def _log(config: Config, monkeypatch: pytest.MonkeyPatch, times: list[float]) -> ProgressLog:
    """A log whose timer returns these times in turn."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=iter(times).__next__))
    return ProgressLog(config)


def test_the_log_prints_at_doubling_intervals(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _log(compose_config(), monkeypatch, [100.0 + second for second in range(301)])
    log.begin(40, 20_000.0)
    log.evaluated({"accuracy": 0.5})
    for second in range(1, 301):
        log.step(40 + second, 32 * second)
    first, reading, *lines = capsys.readouterr().out.splitlines()
    assert first == "continuing at step 40"
    assert reading == "reading about 20,000 fresh examples before the first step"
    assert lines[0] == "step 45, fresh 160, accuracy 0.5000, 0:05"
    assert [int(line.split(",")[0].removeprefix("step ")) - 40 for line in lines] == [
        5,
        15,
        35,
        75,
        135,
        195,
        255,
    ]


def test_a_log_changes_no_record(compose_config: Compose) -> None:
    config = compose_config("task=digits_mlp", "max_steps=40", "target.value=null")
    run_trial(config, Path("run"), log=ProgressLog(config))
    run_trial(config, Path("silent"))
    assert metrics("run") == metrics("silent")
