"""Learning rates against their closed forms, position by position."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from adaecho.config.optimization import ScheduleConfig, check_schedule
from adaecho.errors import ConfigError
from adaecho.training.schedule import Schedule


def _rates(config: ScheduleConfig, positions: range, steps_per_epoch: float | None = None) -> list[float]:
    schedule = Schedule(config, 1.0, steps_per_epoch)
    return [schedule.rate(position) for position in positions]


def test_constant_never_changes() -> None:
    schedule = Schedule(ScheduleConfig(shape="constant"), 0.3)
    assert {schedule.rate(step) for step in (0, 1, 10**9)} == {0.3}


DECAY = {"shape": "linear_decay", "decay_steps": 100, "decay_factor": 100}


def test_linear_decay_by_100_over_100_steps_then_flat_and_a_warmup_rises_to_it() -> None:
    schedule = Schedule(ScheduleConfig(**DECAY), 1.0)
    rates = [schedule.rate(step) for step in (0, 25, 50, 100, 101, 10**6)]
    assert rates == pytest.approx([1.0, 0.7525, 0.505, 0.01, 0.01, 0.01], rel=1e-12)
    warm = _rates(ScheduleConfig(**DECAY, warmup_steps=4), range(6))
    ratios = [one / other for one, other in zip(warm, _rates(ScheduleConfig(**DECAY), range(6)), strict=True)]
    assert ratios == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_drops_by_10_at_the_first_and_a_gap_later() -> None:
    schedule = ScheduleConfig(shape="drops", first_drop_steps=3, drop_gap_steps=2)
    assert _rates(schedule, range(7)) == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    once = ScheduleConfig(shape="drops", first_drop_steps=3, drop_factor=2)
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


def test_epochs_are_steps_per_epoch_times_as_long_and_those_of_a_stream_are_refused() -> None:
    drops = {"shape": "drops", "drop_factor": 10}
    in_epochs = ScheduleConfig(**drops, warmup_epochs=0.5, first_drop_epochs=2, drop_gap_epochs=1.5)
    in_steps = ScheduleConfig(**drops, warmup_steps=2, first_drop_steps=8, drop_gap_steps=6)
    assert _rates(in_epochs, range(20), steps_per_epoch=4) == _rates(in_steps, range(20))
    decay = ScheduleConfig(shape="linear_decay", decay_epochs=2.5)
    in_steps = ScheduleConfig(shape="linear_decay", decay_steps=25)
    assert _rates(decay, range(30), 10) == _rates(in_steps, range(30))
    # A warmup that is no whole number of steps never exceeds the peak.
    rates = _rates(ScheduleConfig(warmup_epochs=1), range(4), steps_per_epoch=2.5)
    assert rates == pytest.approx([0.4, 0.8, 1.0, 1.0])
    with pytest.raises(ConfigError, match=r"schedule\.warmup_epochs=3: .* give schedule\.warmup_steps"):
        Schedule(ScheduleConfig(warmup_epochs=3), 1.0)
