"""What a collate of one's own draws, and who calls it beside whom."""

import time
from itertools import islice
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader
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


def mixed(rows: list[int], rng: np.random.Generator) -> list[tuple[int, float]]:
    """As a recipe for CutMix: a collate with draws of its own."""
    return [(row, rng.random()) for row in rows]


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_what_a_collate_draws_follows_the_batch(variant: dict[str, Any]) -> None:
    found = []
    for num_workers, processes in ((0, False), (3, False), (2, True)):
        common: dict[str, Any] = {"shuffle_buffer": 5, "num_workers": num_workers, "processes": processes}
        with EchoLoader(list(range(50)), 4, collate=mixed, seed=3, **common, **variant) as loader:
            first = list(islice(loader, 9))
            state = loader.state_dict()
            rest = list(islice(loader, 20))
            loader.load_state_dict(state)
            assert list(islice(loader, 20)) == rest
        found.append(first + rest)
    assert found[0] == found[1] == found[2]
    fresh = [batch for batch in found[0] if variant.get("echo") != "batch"]
    assert len({drawn for batch in fresh for _, drawn in batch}) == 4 * len(fresh)
