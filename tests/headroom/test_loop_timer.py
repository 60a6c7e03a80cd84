"""watch(): exact times on a fake clock, and unchanged batches."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader, headroom
from adaecho.headroom import advice, loop_timer
from adaecho.headroom.advice import Loop


class FakeClock:
    """A clock that tests advance by hand."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(loop_timer, "_now", lambda: fake.now)
    return fake


class WithWorkers:
    """Workers that each take ``workers * batch_s`` per batch, in parallel with the loop."""

    def __init__(self, clock: FakeClock, batch_s: float, number: int, workers: int, prefetch_factor: int):
        self.clock, self.batch_s, self.number = clock, batch_s, number
        self.num_workers, self.prefetch_factor = workers, prefetch_factor

    def __iter__(self) -> Iterator[int]:
        free = [self.clock.now] * self.num_workers  # when each worker can begin its next batch
        asked = [self.clock.now] * (self.num_workers * self.prefetch_factor)
        for batch in range(self.number):
            worker = batch % self.num_workers
            ready = max(free[worker], asked[batch]) + self.num_workers * self.batch_s
            free[worker] = ready
            self.clock.now = max(self.clock.now, ready)
            asked.append(self.clock.now)  # each batch taken requests another
            yield batch


class WithoutWorkers:
    """Reads in the thread of the loop, as a DataLoader without workers."""

    num_workers = 0

    def __init__(self, clock: FakeClock, batch_s: float, number: int) -> None:
        self.clock, self.batch_s, self.number = clock, batch_s, number

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.number):
            self.clock.now += self.batch_s
            yield batch


def run(loader: Any, clock: FakeClock, step_s: float) -> headroom.Watch:
    seen = headroom.watch(loader)
    batches = []
    for batch in seen:
        clock.now += step_s
        batches.append(batch)
    assert batches == list(range(loader.number))
    return seen


@pytest.mark.parametrize("upstream_s", [0.01, 0.04, 0.2], ids=["fast", "balanced", "slow"])
@pytest.mark.parametrize(("workers", "prefetch_factor"), [(0, 0), (1, 2), (3, 2), (4, 5)])
def test_the_ratio_of_paced_loaders(
    clock: FakeClock, upstream_s: float, workers: int, prefetch_factor: int
) -> None:
    step_s, inline = 0.04, WithoutWorkers(clock, upstream_s, 400)
    loader = WithWorkers(clock, upstream_s, 400, workers, prefetch_factor) if workers else inline
    seen = run(loader, clock, step_s)
    # If the loop never waits, only an upper bound of the time of the workers is known.
    known_s = max(upstream_s, step_s) if workers else upstream_s
    assert pytest.approx(known_s / step_s, rel=0.03) == seen.R
    assert ("at most" in seen.report()) == (workers > 0 and upstream_s <= step_s)
    waited_s = max(upstream_s - step_s, 0) if workers else upstream_s
    assert seen.step_s == pytest.approx(step_s)
    assert seen.wait_s == pytest.approx(waited_s, rel=0.05, abs=1e-3)
    assert seen.stall_fraction == pytest.approx(waited_s / (waited_s + step_s), abs=0.02)


@pytest.mark.parametrize("factor", [1, 2])
def test_the_ratio_around_a_loader_with_workers(clock: FakeClock, factor: int) -> None:
    class Arrays(WithWorkers):
        def __iter__(self) -> Iterator[Any]:
            return map(np.atleast_1d, super().__iter__())

    around = Arrays(clock, 0.2 * factor, 400, 2, 2)
    settings: dict[str, Any] = {"echo": "batch", "factor": factor} if factor > 1 else {}
    with EchoLoader(around, batch_size=None, epochs=1, **settings) as loader:
        seen = headroom.watch(loader)
        for _ in seen:
            clock.now += 0.04
    assert pytest.approx(0.2 / 0.04, rel=0.05) == seen.R
    assert "(now 2, on " in seen.report()
    assert (". raise the factor of this EchoLoader (now 2): a factor up to 10" in seen.report()) == (
        factor == 2
    )


def test_the_report_of_a_slow_loader(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_cores", lambda: 4)
    lines = run(WithWorkers(clock, 0.12, 100_000, 2, 2), clock, 0.04).report().splitlines()
    assert len(lines) == 4
    assert "80.00 ms wait + 40.00 ms step" in lines[0]
    assert "67% of the time was spent waiting" in lines[0]
    assert lines[1].startswith("R = 3.00: upstream takes 120.00 ms")
    assert "without waiting the loop would be 3.00 times as fast" in lines[1]
    more = "1. use more workers (now 2, on 4 cores): at best 2.00 times as fast with 4, 3.00 times as fast"
    assert lines[2].startswith(more)
    assert lines[3].startswith(
        "2. if the loop still waits, echo with EchoLoader(..., factor=3): a factor up to 3.0 costs no"
    )


def test_the_reports_of_loops_that_need_no_echo(clock: FakeClock) -> None:
    fast = run(WithWorkers(clock, 0.01, 100, 2, 2), clock, 0.04).report()
    assert fast.endswith("The loop hardly waits for data. Nothing to do.")
    in_turn = run(WithoutWorkers(clock, 0.02, 100), clock, 0.04).report().splitlines()
    assert len(in_turn) == 3
    assert "at best 1.50 times as fast with 1 if" in in_turn[2]


def loop(**measured: Any) -> Loop:
    """A loop that reads in its own thread and waits 100 ms for each step of 10 ms."""
    usual = {"wait_s": 0.1, "step_s": 0.01, "upstream_s": 0.1, "workers": 0}
    return Loop(**{**usual, **measured})


def test_the_speedup_by_more_workers() -> None:
    each = "2.20 times as fast with 2, 4.40 times as fast with 4, 8.80 times as fast with 8"
    assert each in advice.advice(loop())[0]
    assert "more workers" not in "".join(advice.advice(loop(workers=32, wait_s=0.09)))
    assert advice.advice(loop(workers=2, upstream_s=0.005, wait_s=0.0)) == []


def test_a_cache_that_fits_is_suggested_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from adaecho.echo.memory import pool

    monkeypatch.setattr(pool, "free_bytes", lambda: 10 << 30)
    monkeypatch.setattr(advice.shutil, "disk_usage", lambda _: SimpleNamespace(free=100 << 30))
    memory, disk, neither = (
        advice.advice(loop(epoch_bytes=batches << 20))[0] for batches in (5000, 10**4, 10**5)
    )
    assert "in memory: an epoch of these batches takes 4.9 GiB, and 10.0 GiB are free" in memory
    assert "on a local disk" in disk
    assert neither.startswith("1. use more workers")
    balanced = loop(epoch_bytes=10 << 20, upstream_s=0.01, wait_s=0.01)
    assert "cache" not in "".join(advice.advice(balanced))


def test_an_evaluation_in_the_loop_is_not_counted(clock: FakeClock) -> None:
    seen = headroom.watch(WithoutWorkers(clock, 0.02, 100))
    for number in seen:
        clock.now += 0.04 if number % 25 else 3.0
    assert seen.step_s == pytest.approx(0.04)
    assert seen.stall_fraction == pytest.approx(1 / 3)


def test_several_epochs_and_short_ones(clock: FakeClock) -> None:
    for number in range(6):
        seen = run(WithoutWorkers(clock, 0.02, number), clock, 0.04)
        if not number:
            assert "no steps were counted" in seen.report()
        for _ in range(2):
            assert len(list(seen)) == number
    assert len(headroom.watch(range(7))) == 7


def test_a_callback_may_time_the_steps(clock: FakeClock) -> None:
    seen = headroom.Watch()
    for step in range(50):
        seen.begin_step()
        clock.now += 0.04
        seen.end_step()
        if step % 10 == 0:
            clock.now += 5  # an evaluation
            seen.resume()
        clock.now += 0.02
    assert (seen.wait_s, seen.step_s) == (pytest.approx(0.02), pytest.approx(0.04))


def test_on_a_gpu_only_the_report_waits(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake GPU that completes each event 0.1 seconds after the loop recorded it."""
    waited = []

    class Event:
        def __init__(self) -> None:
            self.at = clock.now

        def query(self) -> bool:
            return self.at + 0.1 <= clock.now

        def synchronize(self) -> None:
            waited.append(self)

        def elapsed_time(self, end: "Event") -> float:
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(loop_timer, "_now", Event)
    seen = run(WithoutWorkers(clock, 0.02, 40), clock, 0.04)
    assert seen.batches < 39
    assert not waited
    assert "39 steps" in seen.report()
    assert waited
    assert seen.wait_s == pytest.approx(0.02)


def test_the_report_is_printed_at_the_end_and_not_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with headroom.watch([1, 2, 3]) as seen:
        assert list(seen) == [1, 2, 3]
    assert capsys.readouterr().out.startswith("headroom, 2 steps: ")
    with pytest.raises(ZeroDivisionError), headroom.watch([1]):
        raise ZeroDivisionError
    assert capsys.readouterr().out == ""


def test_batches_and_attributes_of_a_data_loader_pass_through() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(200.0), torch.arange(200))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2)
    seen = headroom.watch(loader)
    assert len(seen) == 25
    assert (len(seen.dataset), seen.batch_size) == (200, 8)
    with pytest.raises(AttributeError, match="no_such"):
        _ = seen.no_such
    for batch, expected in zip(seen, loader, strict=True):
        torch.testing.assert_close(batch, expected, rtol=0, atol=0)
    nested = {"x": np.zeros((4, 2)), "more": [torch.zeros(3), (np.zeros(1, np.uint8), "a")]}
    assert loop_timer.num_bytes(nested) == 64 + 12 + 1
