"""What a collate of one's own draws, and who calls it beside whom."""

import random
import threading
import time
import warnings
from itertools import islice
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.batch.batches import _TOLD_UNSEEDED
from tests.echo.behaviour.test_datasets_in_threads import Transformed, disturb, draw
from tests.echo.sources import IDS, VARIANTS


class Cutting:
    """Keeps the length that it was asked for last, as a tokenizer of Hugging Face does."""

    def __call__(self, rows: list[int]) -> list[int]:
        lengths = []
        for length in rows:
            self.length = length
            time.sleep(0.0005)
            lengths.append(self.length)
        return lengths


@pytest.mark.parametrize("processes", [False, True])
def test_a_collate_is_called_by_one_thread_at_a_time(processes: bool) -> None:
    common: dict[str, Any] = {"shuffle": False, "epochs": 1, "num_workers": 4, "processes": processes}
    with EchoLoader(list(range(200)), 4, collate_fn=Cutting(), **common) as loader:
        assert [row for batch in loader for row in batch] == list(range(200))


def mixed(rows: list[int]) -> list[tuple[Any, ...]]:
    """As torchvision's recipe for CutMix: a collate with draws of its own."""
    return list(zip(rows, draw(len(rows)), strict=True))


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_what_a_collate_draws_follows_the_batch(variant: dict[str, Any]) -> None:
    found, own = [], []
    for num_workers, processes in ((0, False), (3, False), (2, True)):
        common: dict[str, Any] = {"shuffle_buffer": 5, "num_workers": num_workers, "processes": processes}
        with EchoLoader(list(range(50)), 4, collate=mixed, seed=3, **common, **variant) as loader:
            with pytest.warns(UserWarning, match="collate draws random numbers") as caught:
                first = list(islice(loader, 9))
            assert [warning.filename for warning in caught] == [__file__]
            state = loader.state_dict()
            disturb()
            rest = list(islice(loader, 20))
            own.append(draw(1))
            loader.load_state_dict(state)
            assert list(islice(loader, 20)) == rest
        found.append(first + rest)
    assert found[0] == found[1] == found[2]
    disturb()
    assert own == [draw(1)] * 3
    fresh = [batch for batch in found[0] if variant.get("echo") != "batch"]
    assert len({drawn for batch in fresh for _, drawn in batch}) == 4 * len(fresh)


def test_a_collate_that_draws_counts_as_work_after_the_echo_and_meets_the_settings_of_a_thread() -> None:
    def collate(rows: list[int]) -> Any:
        time.sleep(0.01)
        return torch.tensor(rows), torch.rand(len(rows))

    def devices(rows: list[int]) -> Any:
        return torch.tensor(rows).device.type

    common: dict[str, Any] = {"num_workers": 2, "epochs": 1, "echo": "example_before_augmentation"}
    with EchoLoader(list(range(200)), 4, collate=collate, **common) as loader:
        with pytest.warns(UserWarning, match="collate draws"):
            assert len(list(loader)) == 50
        assert (loader.downstream_s_per_step or 0.0) > 0.005
    with torch.device("meta"), EchoLoader(list(range(200)), 4, collate=devices, **common) as loader:
        assert set(loader) == {"cpu"}


def test_the_generators_are_left_to_a_step_beside_the_thread_that_takes_batches() -> None:
    def take() -> None:
        with EchoLoader(Transformed(int), 4, collate=collate, epochs=1, num_workers=2) as loader:
            taken.extend(batch for _ in range(4) for batch in loader)

    def draws(rows: list[int]) -> list[int]:
        random.random()
        return sorted(rows)

    taken = list[Any]()
    for collate, told in ((draws, [_TOLD_UNSEEDED]), (sorted, [])):  # noqa: B007 (take() uses it)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(1)
            taking, drawn = threading.Thread(target=take), list[float]()
            taking.start()
            while taking.is_alive():
                drawn.append(float(torch.rand(())))
                time.sleep(0.0001)
            torch.manual_seed(1)
            assert [float(torch.rand(())) for _ in drawn] == drawn
        assert [str(one.message) for one in caught][: len(told)] == told
    assert sum(map(len, taken)) == 2 * 4 * 40


def test_a_collate_that_draws_for_few_batches_is_seeded_for_these_without_workers() -> None:
    def collate(rows: list[int]) -> list[Any]:
        return [*rows, random.random()] if max(rows) > 15 else rows

    def make() -> EchoLoader:
        return EchoLoader(list(range(40)), 4, collate=collate, order="stored", epochs=1)

    first, resumed = make(), make()
    batches = list(first)
    assert [len(batch) for batch in batches[:5]] == [4, 4, 4, 4, 5], "or this test shows nothing"
    start = make()
    taken = iter(start)
    assert [next(taken) for _ in range(2)] == batches[:2]
    resumed.load_state_dict(start.state_dict())
    random.seed(9)
    assert list(islice(resumed, 4)) == batches[2:6]
