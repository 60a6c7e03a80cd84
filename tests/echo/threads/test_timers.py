"""Timers, R and the automatic factor, with clocks that the tests advance."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from adaecho import EchoLoader
from adaecho.echo.order.stream import AutoFactor
from adaecho.echo.stats import Counters, Timers
from tests.conftest import HandClock
from tests.echo.sources import Dataset as Rows
from tests.echo.sources import arrays, labels

UPSTREAM_S, STEP_S = 4.0, 1.0
R = UPSTREAM_S / STEP_S


def test_timers_with_a_manual_clock(clock: HandClock) -> None:
    """The slowest upstream stage takes 3 s per fresh batch and the step 1 s, so R = 3."""
    counters = Counters((0.0, 0.0), (0.0, 0.0), 0.0)
    timers = Timers(lambda: counters)
    for step in range(40):
        asked = clock.now
        clock.now += 0.5
        timers.waited(asked)
        counters = Counters((0.5 * step, 1.5 * step), (0.1 * step, 0.2 * step), fresh_batches=step / 2)
        timers.step()
        clock.now += 1.0
        if step == 20:
            clock.now += 1000.0
            timers.pause()
    assert timers.wait_time_s == pytest.approx(20)
    assert timers.upstream_s_per_batch == pytest.approx(3)
    assert timers.downstream_s_per_step == pytest.approx(1)
    assert timers.ratio == pytest.approx(3)
    other = Timers(lambda: counters)
    assert other.ratio is None
    other.load_state(timers.state())
    assert other.ratio == timers.ratio


class ThreadClock(threading.local):
    """Replaces ``time.perf_counter``: ``work`` advances the time of its thread, and waiting takes no time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, duration_s: float) -> None:
        self.now += duration_s


CLOCK = ThreadClock()


@pytest.fixture
def _thread_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK.now = 0.0
    monkeypatch.setattr(time, "perf_counter", CLOCK)


def with_work(given: Any, duration_s: float = UPSTREAM_S / 4) -> Any:
    CLOCK.work(duration_s)
    return given


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, row: int) -> torch.Tensor:
        return with_work(torch.full((2,), row))  # type: ignore[no-any-return]


class WorksAhead:
    """Like a DataLoader with workers: a batch every UPSTREAM_S, independent of the consumer."""

    num_workers = 2

    def __iter__(self) -> Iterator[torch.Tensor]:
        ready_at = CLOCK.now
        while True:
            ready_at += UPSTREAM_S
            CLOCK.now = max(CLOCK.now, ready_at)
            yield torch.zeros(4, 2)


# Source, batch size, further arguments
DIVIDED = {  # the loader's workers share the upstream work
    "map-style": (Slow, 4, {}),
    "decode": (lambda: range(10_000), 4, {"decode": with_work}),
    "processes": (lambda: range(10_000), 4, {"decode": with_work, "processes": True}),
}
SOURCES: dict[str, tuple[Callable[[], Any], int | None, dict[str, Any]]] = DIVIDED | {
    "examples": (lambda: lambda: map(with_work, repeat(torch.zeros(2))), 4, {}),
    "batches": (lambda: lambda: map(with_work, repeat(torch.zeros(4, 2)), repeat(UPSTREAM_S)), None, {}),
    "works ahead": (WorksAhead, None, {}),
}
# WorksAhead needs a thread that waits for it, because inline it also works during the steps
WORKERS = {name: {"works ahead": (1, 4), "processes": (1, 2)}.get(name, (0, 1)) for name in SOURCES}
# Threads may have prefetched two batches of the 25 that R is averaged over
READ_AHEAD = 2 / 25


def measured_r_and_factor(name: str, factor: Any, num_workers: int) -> tuple[Any, Any]:
    make, batch_size, more = SOURCES[name]
    common: dict[str, Any] = {"echo": "batch", "factor": factor, "num_workers": num_workers, "prefetch": 1}
    with EchoLoader(make(), batch_size, **common, **more) as loader:
        found = []
        for _ in islice(loader, 200):
            CLOCK.work(STEP_S)
            found.append(loader.R)
        return sum(found[-100:]) / 100, loader.factor  # a mean, because R varies while threads read ahead


@pytest.mark.usefixtures("_thread_clock")
@pytest.mark.parametrize(
    ("name", "num_workers"), [(name, count) for name in SOURCES for count in WORKERS[name]]
)
def test_r_of_sources_with_known_costs(name: str, num_workers: int) -> None:
    expected = R / (max(num_workers, 1) if name in DIVIDED else 1)
    measured, _ = measured_r_and_factor(name, 2, num_workers)
    assert measured == pytest.approx(expected, rel=READ_AHEAD if num_workers else 1e-9)


@pytest.mark.usefixtures("_thread_clock")
@pytest.mark.parametrize(
    ("name", "num_workers"),
    [(name, workers) for name in ("examples", "batches", "works ahead") for workers in WORKERS[name]],
)
def test_the_automatic_factor_converges_to_r(name: str, num_workers: int) -> None:
    # Changes of less than 5% are ignored
    expected = pytest.approx(R, rel=0.05 + 2 * READ_AHEAD * bool(num_workers))
    assert measured_r_and_factor(name, "auto", num_workers)[1] == expected


@pytest.mark.usefixtures("_thread_clock")
@pytest.mark.parametrize("echo", ["batch", "example_before_augmentation"])
def test_the_automatic_factor_continues_after_a_resume(echo: str) -> None:
    def decode(row: dict[str, Any]) -> dict[str, Any]:
        CLOCK.work(0.002)
        return row

    def make() -> EchoLoader:
        given: dict[str, Any] = {"factor": "auto", "max_factor": 3, "shuffle_buffer": 4, "decode": decode}
        return EchoLoader(Rows(50), 4, echo=echo, num_workers=1, **given)

    with make() as loader:
        assert loader.factor == 1
        iterator = iter(loader)
        for _ in islice(iterator, 400):
            CLOCK.work(1e-4)  # R is far above max_factor
        assert loader.factor == loader.factor_changes[-1][1] == 3
        assert loader.R is not None
        assert loader.R > 1
        state = loader.state_dict()
        expected = labels(iterator, 4)
    with make() as restored:
        restored.load_state_dict(state)
        assert restored.factor == 3
        flat = state["batch_factors" if echo == "batch" else "example_factors"]
        assert restored.factor_changes == list(zip(flat[2::2], flat[3::2], strict=True))
        assert labels(restored, 4) == expected


def test_the_automatic_factor_is_bounded_and_ignores_noise() -> None:
    loader = EchoLoader(arrays(9), 3, echo="example_before_augmentation", factor="auto")
    factor = loader._pipeline.streams.factor
    asked: list[float] = []
    factor.change = asked.append  # type: ignore[method-assign]
    auto = AutoFactor(max_factor=4)
    for ratio in (None, 0.3, 1.04, 2.5, 9.0):
        for _ in range(20):
            if auto.due():
                auto.follow(ratio, factor)
    assert asked == [2.5, 4]
