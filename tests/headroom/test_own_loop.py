"""Watching one's own loop: exact on a made-up clock, and the same batches in the same order on any loader."""

import multiprocessing
import time
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader, headroom
from adaecho.headroom import advice, own_loop
from adaecho.headroom.advice import Loop
from scripts import expected_gains


class MadeUpClock(own_loop.HostClock):
    """Time passes only where somebody lets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:  # type: ignore[override]
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MadeUpClock:
    made_up = MadeUpClock()
    monkeypatch.setattr(own_loop, "_clock", lambda: made_up)
    monkeypatch.setattr(own_loop, "HostClock", lambda: made_up)
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
    """Reads in the loop's own thread."""

    def __init__(self, clock: MadeUpClock, batch_s: float, number: int) -> None:
        self.clock, self.batch_s, self.number = clock, batch_s, number

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.number):
            self.clock.now += self.batch_s
            yield batch


def run(loader: Any, clock: MadeUpClock, step_s: float, **settings: Any) -> headroom.Watch:
    seen = headroom.watch(loader, **settings)
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
    assert pytest.approx(upstream_s / step_s, rel=0.01) == seen.R
    assert seen.downstream_s == pytest.approx(step_s)
    waited_s = max(upstream_s - step_s, 0) if workers else upstream_s
    assert seen.wait_s == pytest.approx(waited_s, rel=0.05, abs=1e-3)
    assert seen.lost == pytest.approx(waited_s / (waited_s + step_s), abs=0.02)
    assert seen.ideal_gain == pytest.approx((waited_s + step_s) / step_s, rel=0.05)


class InRounds(InTurn):
    """Two workers that give their batches together, and at the end of a pass one more."""

    num_workers, prefetch_factor = 2, 2

    def __init__(self, clock: MadeUpClock, number: int) -> None:
        super().__init__(clock, 0.0, number)

    def __iter__(self) -> Iterator[int]:
        for batch in super().__iter__():
            self.clock.now += 0.08 * (batch % 2)
            yield batch


class Arrays(Beside):
    def __iter__(self) -> Iterator[Any]:
        return map(np.atleast_1d, super().__iter__())


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("upstream_s", [0.01, 0.07, 0.2], ids=["fast", "above", "slow"])
def test_the_ratio_around_a_loader_that_works_ahead(
    clock: MadeUpClock, upstream_s: float, factor: int
) -> None:
    """Its workers read beside the step, whoever asks it for batches."""
    around = Arrays(clock, upstream_s * factor, 200, 2, 2)
    settings: dict[str, Any] = {"echo": "batch", "factor": factor} if factor > 1 else {}
    with EchoLoader(around, batch_size=None, epochs=1, **settings) as loader:
        seen = headroom.watch(loader)
        for _ in seen:
            clock.now += 0.04
    assert pytest.approx(upstream_s / 0.04, rel=0.05) == seen.R
    assert "(now 0" not in seen.report()


@pytest.mark.parametrize("number", range(10, 15))
def test_a_pass_that_ends_while_the_loader_runs_alone_says_what_whole_rounds_do(
    clock: MadeUpClock, number: int
) -> None:
    seen = run(InRounds(clock, number), clock, 0.02)
    assert seen.loader_s == (pytest.approx(0.04) if number > 10 else None)


def test_gains_follow_equation_1(clock: MadeUpClock) -> None:
    seen = run(Beside(clock, 0.12, 200, 2, 2), clock, 0.04)  # R = 3
    gains = [seen.gain(*at) for at in ((2, 0.5), (3, 0.5), (6, 0.5), (1, 1))]
    assert gains == pytest.approx([2, 2, 1, 1])


def test_the_report_of_a_slow_loader(clock: MadeUpClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_loop, "cores_kept_busy", lambda *_: 0.5)
    monkeypatch.setattr(own_loop, "cores", lambda: 4)
    lines = run(Beside(clock, 0.12, 200, 2, 2), clock, 0.04).report().splitlines()
    assert len(lines) == 5
    assert "80.00 ms of waiting and 40.00 ms of step" in lines[0]
    assert "67% of the time was lost" in lines[0]
    assert lines[1].startswith("R = 3.00: upstream 120.00 ms")
    assert "never waiting would be 3.00 times as fast" in lines[1]
    assert lines[2] == (
        "1. more workers (now 2, 0.5 of 4 cores busy while it ran alone): at best 2.00 times as fast with 4, "
        "3.00 times as fast with 8"
    )
    assert lines[3].startswith("2. EchoLoader(..., factor=3), for what is left: up to 3.0 costs no time")
    rows = [row for row in advice.expected() if row["variant"] == "batch"]
    gains = sorted(1 / row["fresh_ratio"] for row in rows)  # at R = 3 two steps cost no time
    assert f"batch {gains[0]:.2f} to {gains[-1]:.2f}" in lines[4]
    assert "results/fig3/digits" in lines[4]


def test_a_loader_that_echoes_is_advised_on_its_factor(clock: MadeUpClock) -> None:
    def slow() -> Iterator[np.ndarray]:
        for number in range(200):
            clock.now += 0.24
            yield np.array([number])

    seen = headroom.watch(EchoLoader(slow(), batch_size=None, echo="batch", factor=2, epochs=1))
    for _ in seen:
        clock.now += 0.04
    report = seen.report()
    assert ". a larger factor than this EchoLoader's 2: up to " in report
    assert "with echoing at e = 2, if yours goes" not in report


def test_the_reports_of_loops_that_need_no_echo(clock: MadeUpClock) -> None:
    fast = run(Beside(clock, 0.01, 100, 2, 2), clock, 0.04).report()
    assert fast.endswith("The loop hardly waits for data: nothing to do.")
    in_turn = run(InTurn(clock, 0.02, 100), clock, 0.04).report().splitlines()
    assert len(in_turn) == 3
    assert in_turn[2].startswith("1. more workers: at best 1.50 times as fast with 1")
    without_steps = headroom.watch(InTurn(clock, 0.02, 100))
    assert len(list(without_steps)) == 100
    none = "No R: a step takes no time, so nothing is trained between batches."
    assert without_steps.report().endswith(none)


def loop(**measured: Any) -> Loop:
    """One that waits 100 ms for each step of 10, read by its own thread, which waits for storage."""
    usual = {
        "wait_s": 0.1, "step_s": 0.01, "upstream_s": 0.1, "downstream_s": 0.01, "workers": 0,
        "threads": False, "busy": 0.0, "cores": 8, "batch_bytes": 0, "batches": 0, "echoed": 1.0,
    }  # fmt: skip
    return Loop(**{**usual, **measured})  # type: ignore[arg-type]


FOUR = {"workers": 4, "wait_s": 0.09}
EACH = "2.20 times as fast with 2, 4.40 times as fast with 4, 8.80 times as fast with 8"


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ({}, EACH),
        ({"busy": 1.0}, EACH),
        ({"busy": 1.0, "cores": 2}, "at best 2.20 times as fast with 2"),
        ({**FOUR, "busy": 3.9, "cores": 4}, "cheaper decoding, or augmentation on the GPU"),
        ({**FOUR, "threads": True, "busy": 1.05}, "processes=True: threads wait for the"),
        ({"busy": None}, "where it computes, no more than the cores allow"),
        ({"workers": 2, "upstream_s": 0.005, "wait_s": 0.0}, ""),
    ],
)
def test_what_more_workers_give_follows_from_cores_and_from_what_computes(
    measured: dict[str, Any], says: str
) -> None:
    tried = advice.before_echoing(loop(**measured))
    assert bool(tried) == bool(says)
    assert says in "".join(tried)


def test_what_fits_is_kept_before_anything_is_echoed(monkeypatch: pytest.MonkeyPatch) -> None:
    from adaecho.echo.memory import budget

    monkeypatch.setattr(budget, "free_bytes", lambda: 10 << 30)
    monkeypatch.setattr(advice.shutil, "disk_usage", lambda _: SimpleNamespace(free=100 << 30))
    memory, disk, neither = (
        advice.steps(loop(batch_bytes=1 << 20, batches=batches))[0] for batches in (5000, 10**4, 10**5)
    )
    assert "in memory, read and decoded once: a pass of these batches is 4.9 GiB, and 10.0 GiB are" in memory
    assert "on a local disk" in disk
    assert neither.startswith("more workers")
    balanced = loop(batch_bytes=1 << 20, batches=10, upstream_s=0.01, wait_s=0.01)
    assert "keep what" not in "".join(advice.steps(balanced))


def test_busy_cores_are_those_of_this_process_and_its_children() -> None:
    def spin(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    before = advice.cpu_s()
    if before is None:
        pytest.skip("this system tells no processor times in /proc")
    child = multiprocessing.get_context("fork").Process(target=spin, args=(0.4,))
    child.start()
    spin(0.4)
    child.join()
    after = advice.cpu_s()
    assert after is not None
    assert after - before >= 0.7
    time.sleep(0.3)
    slept = advice.cpu_s()
    assert slept is not None
    assert slept - after < 0.2  # whatever else this machine does


def test_short_passes_are_probed_once(clock: MadeUpClock) -> None:
    seen = headroom.watch(InTurn(clock, 0.02, 12))
    for _ in range(6):
        for _ in seen:
            clock.now += 0.04
    assert seen.batches >= 50


def test_times_that_contradict_one_another_are_no_advice() -> None:
    """Half of the time was lost, and yet steps on batches at hand take longer than both together."""
    seen = headroom.Watch()
    seen.batches, seen._wait_s, seen._step_s = 10, 0.1, 0.1
    seen._ideal_s, seen._ideal_steps = 0.9, 10
    assert "at hand 90.00 ms; never waiting would be 0.22 times" in seen.report()
    assert seen.report().splitlines()[-1].startswith("These contradict one another: something else was")
    assert len(seen.report().splitlines()) == 3
    seen._ideal_s = 0.1
    assert "contradict" not in seen.report()


def test_an_evaluation_within_the_loop_is_no_step(clock: MadeUpClock) -> None:
    seen = headroom.watch(InTurn(clock, 0.02, 100))
    for number in seen:
        clock.now += 0.04 if number % 25 else 3.0
    assert seen.step_s == pytest.approx(0.04)
    assert seen.lost == pytest.approx(1 / 3)


def test_a_queue_of_unknown_length_is_found(clock: MadeUpClock) -> None:
    loader = Beside(clock, 0.12, 200, 1, 3)
    del loader.prefetch_factor  # as of a loader that prefetches and doesn't say so

    class Bare:
        number = 200

        def __iter__(self) -> Iterator[int]:
            loader.prefetch_factor = 3
            return iter(loader)

    assert pytest.approx(0.5, rel=0.01) == run(Bare(), clock, 0.24).R
    assert pytest.approx(3, rel=0.01) == run(Bare(), clock, 0.04).R


def test_passes_follow_one_another_and_short_ones_are_whole(clock: MadeUpClock) -> None:
    for number in range(25):
        seen = run(InTurn(clock, 0.02, number), clock, 0.04)
        if not number:
            assert "no step was counted yet" in seen.report()
        for _ in range(2):
            assert len(list(seen)) == number
        assert seen.report()
    assert headroom.watch(range(7)).__len__() == 7


def test_without_reading_ahead_the_ratio_is_told_from_the_waits(clock: MadeUpClock) -> None:
    seen = run(Beside(clock, 0.12, 100, 2, 2), clock, 0.04, replay=0)
    assert seen.loader_s is None
    assert pytest.approx(3, rel=0.05) == seen.R
    assert "at most, since the loader was not run alone" in seen.report()
    with pytest.raises(ValueError, match="replay=-1"):
        headroom.watch([], replay=-1)


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
    with pytest.raises(TypeError, match="watches no loader"):
        next(iter(seen))


class LateClock(MadeUpClock):
    """A GPU that comes to each event 0.1 seconds after the loop, and tells of none before."""

    waited = 0

    def seconds(self, begin: float, end: float) -> float | None:  # type: ignore[override]
        return end - begin if end + 0.1 <= self.now or self.waited else None

    def wait_for(self, mark: float) -> None:  # noqa: ARG002
        self.waited += 1


def test_on_a_gpu_nothing_waits_before_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateClock()
    monkeypatch.setattr(own_loop, "_clock", lambda: late)
    seen = run(InTurn(late, 0.02, 40), late, 0.04, replay=0)
    assert seen.batches < 39
    assert late.waited == 0
    assert "39 steps" in seen.report()
    assert late.waited == 1
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
    assert seen.loader_s is not None
    assert seen.batch_bytes == 8 * 4 + 8 * 8
    assert advice.num_bytes(torch.eye(2).to_sparse()) == 0
    nested = {"x": np.zeros((4, 2)), "more": [torch.zeros(3), (np.zeros(1, np.uint8), "a")]}
    assert advice.num_bytes(nested) == 64 + 12 + 1


def test_batches_that_lie_in_one_memory_come_as_they_were() -> None:
    memory = np.zeros(2)

    def source() -> Iterator[Any]:
        for number in range(40):
            memory[:] = number
            yield {"x": memory}

    assert [batch["x"][0] for batch in headroom.watch(source())] == list(range(40))


def test_the_records_say_what_the_file_says() -> None:
    assert advice.expected() == expected_gains.rows() != []
    assert {row["factor"] for row in advice.expected()} == {2}


class InBursts(InTurn):
    """Every twentieth batch takes 0.6 s, as where a shard is opened; the others nothing."""

    def __init__(self, clock: MadeUpClock, workers: int) -> None:
        super().__init__(clock, 0.0, 100)
        self.num_workers, self.prefetch_factor = workers, 1

    def __iter__(self) -> Iterator[int]:
        for batch in super().__iter__():
            self.clock.now += 0.6 * (batch % 20 == 19)
            yield batch


def test_a_loader_that_is_slow_now_and_then_is_no_fast_one(clock: MadeUpClock) -> None:
    """A few batches read alone met none of its pauses."""
    in_turn, ahead = (run(InBursts(clock, workers), clock, 0.01) for workers in (0, 1))
    assert in_turn.loader_s == 0
    assert 2.5 < in_turn.R < 4
    assert "at best" in in_turn.report()
    assert ahead.report().splitlines()[-1].startswith("These contradict one another")


def test_a_pass_begins_with_its_own_batches() -> None:
    """What was read ahead of a pass that was broken off is not given in the next; an endless one goes on."""
    seen = headroom.watch(list(range(40)))
    assert list(islice(seen, 8)) == list(range(8))
    assert list(seen) == list(range(40))
    kept = SimpleNamespace(iterator=iter(range(40)))
    seen = headroom.watch(type("Kept", (), {"__iter__": lambda _: kept.iterator})())
    assert [*islice(seen, 8), *seen] == list(range(40))
    rows: Any = range(40)
    persistent = torch.utils.data.DataLoader(rows, 1, num_workers=1, persistent_workers=True)
    seen = headroom.watch(persistent)
    assert [int(batch) for batch in [*islice(seen, 8), *seen]] == [*range(8), *range(40)]
    with EchoLoader(list(range(40)), 1, shuffle=False) as endless:
        seen = headroom.watch(endless)
        assert [int(batch) for batch in [*islice(seen, 8), *islice(seen, 8)]] == list(range(16))
