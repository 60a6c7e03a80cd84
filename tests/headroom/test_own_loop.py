"""Watching one's own loop: exact on a made-up clock, and the same batches in the same order on any loader."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader, headroom
from adaecho.headroom import advice, own_loop
from adaecho.headroom.advice import Loop


class MadeUpClock:
    """Time passes only where somebody lets it."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MadeUpClock:
    made_up = MadeUpClock()
    monkeypatch.setattr(own_loop, "_now", lambda: made_up.now)
    return made_up


class Beside:
    """Workers that each take ``workers * batch_s`` for a batch, beside the loop, up to ``queue`` ahead."""

    def __init__(self, clock: MadeUpClock, batch_s: float, number: int, workers: int, prefetch_factor: int):
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
            asked.append(self.clock.now)  # taking one asks for another
            yield batch


class InTurn:
    """Reads in the loop's own thread, as a DataLoader without workers."""

    num_workers = 0

    def __init__(self, clock: MadeUpClock, batch_s: float, number: int) -> None:
        self.clock, self.batch_s, self.number = clock, batch_s, number

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.number):
            self.clock.now += self.batch_s
            yield batch


def run(loader: Any, clock: MadeUpClock, step_s: float) -> headroom.Watch:
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
    clock: MadeUpClock, upstream_s: float, workers: int, prefetch_factor: int
) -> None:
    step_s, in_turn = 0.04, InTurn(clock, upstream_s, 400)
    loader = Beside(clock, upstream_s, 400, workers, prefetch_factor) if workers else in_turn
    seen = run(loader, clock, step_s)
    # Workers that the loop never waits for are at least as fast as the step: that much is known of them.
    known_s = max(upstream_s, step_s) if workers else upstream_s
    assert pytest.approx(known_s / step_s, rel=0.03) == seen.R
    assert ("at most" in seen.report()) == (workers > 0 and upstream_s <= step_s)
    waited_s = max(upstream_s - step_s, 0) if workers else upstream_s
    assert seen.step_s == pytest.approx(step_s)
    assert seen.wait_s == pytest.approx(waited_s, rel=0.05, abs=1e-3)
    assert seen.lost == pytest.approx(waited_s / (waited_s + step_s), abs=0.02)


@pytest.mark.parametrize("factor", [1, 2])
def test_the_ratio_around_a_loader_that_works_ahead(clock: MadeUpClock, factor: int) -> None:
    """Its workers read beside the step, whoever asks it for batches."""

    class Arrays(Beside):
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
    assert (". a larger factor than this EchoLoader's 2: up to 10" in seen.report()) == (factor == 2)


def test_the_report_of_a_slow_loader(clock: MadeUpClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_cores", lambda: 4)
    lines = run(Beside(clock, 0.12, 100_000, 2, 2), clock, 0.04).report().splitlines()
    assert len(lines) == 4
    assert "80.00 ms of waiting and 40.00 ms of step" in lines[0]
    assert "67% of the time was lost" in lines[0]
    assert lines[1].startswith("R = 3.00: upstream 120.00 ms")
    assert "never waiting would be 3.00 times as fast" in lines[1]
    more = (
        "1. more workers (now 2, on 4 cores): at best 2.00 times as fast with 4, 3.00 times as fast with 8,"
    )
    assert lines[2].startswith(more)
    assert lines[3].startswith("2. EchoLoader(..., factor=3), for what is left: up to 3.0 costs no time")


def test_the_reports_of_loops_that_need_no_echo(clock: MadeUpClock) -> None:
    fast = run(Beside(clock, 0.01, 100, 2, 2), clock, 0.04).report()
    assert fast.endswith("The loop hardly waits for data: nothing to do.")
    in_turn = run(InTurn(clock, 0.02, 100), clock, 0.04).report().splitlines()
    assert len(in_turn) == 3
    assert "at best 1.50 times as fast with 1, where" in in_turn[2]


def loop(**measured: Any) -> Loop:
    """One that waits 100 ms for each step of 10, read by its own thread."""
    usual = {"wait_s": 0.1, "step_s": 0.01, "upstream_s": 0.1, "workers": 0}
    return Loop(**{**usual, **measured})


def test_what_more_workers_give_is_shared_out_among_them() -> None:
    each = "2.20 times as fast with 2, 4.40 times as fast with 4, 8.80 times as fast with 8"
    assert each in advice.advice(loop())[0]
    assert "more workers" not in "".join(advice.advice(loop(workers=32, wait_s=0.09)))
    assert advice.advice(loop(workers=2, upstream_s=0.005, wait_s=0.0)) == []


def test_what_fits_is_kept_before_anything_is_echoed(monkeypatch: pytest.MonkeyPatch) -> None:
    from adaecho.echo.memory import pool

    monkeypatch.setattr(pool, "free_bytes", lambda: 10 << 30)
    monkeypatch.setattr(advice.shutil, "disk_usage", lambda _: SimpleNamespace(free=100 << 30))
    memory, disk, neither = (
        advice.advice(loop(pass_bytes=batches << 20))[0] for batches in (5000, 10**4, 10**5)
    )
    assert "in memory, read and decoded once: a pass of these batches is 4.9 GiB, and 10.0 GiB are" in memory
    assert "on a local disk" in disk
    assert neither.startswith("1. more workers")
    balanced = loop(pass_bytes=10 << 20, upstream_s=0.01, wait_s=0.01)
    assert "keep what" not in "".join(advice.advice(balanced))


def test_an_evaluation_within_the_loop_is_no_step(clock: MadeUpClock) -> None:
    seen = headroom.watch(InTurn(clock, 0.02, 100))
    for number in seen:
        clock.now += 0.04 if number % 25 else 3.0
    assert seen.step_s == pytest.approx(0.04)
    assert seen.lost == pytest.approx(1 / 3)


def test_passes_follow_one_another_and_short_ones_are_whole(clock: MadeUpClock) -> None:
    for number in range(6):
        seen = run(InTurn(clock, 0.02, number), clock, 0.04)
        if not number:
            assert "no step was counted yet" in seen.report()
        for _ in range(2):
            assert len(list(seen)) == number
    assert len(headroom.watch(range(7))) == 7


def test_a_callback_tells_of_steps_itself(clock: MadeUpClock) -> None:
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


def test_on_a_gpu_nothing_waits_before_the_report(
    clock: MadeUpClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that comes to each event 0.1 seconds after the loop, and tells of none before."""
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

    monkeypatch.setattr(own_loop, "_now", Event)
    seen = run(InTurn(clock, 0.02, 40), clock, 0.04)
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


def test_batches_of_a_data_loader_are_its_own() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(200.0), torch.arange(200))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2)
    seen = headroom.watch(loader)
    assert len(seen) == 25
    for batch, expected in zip(seen, loader, strict=True):
        torch.testing.assert_close(batch, expected, rtol=0, atol=0)
    nested = {"x": np.zeros((4, 2)), "more": [torch.zeros(3), (np.zeros(1, np.uint8), "a")]}
    assert own_loop.num_bytes(nested) == 64 + 12 + 1
