"""The global generators while something else draws: whatever is drawn inside, they are given back."""

import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from adaecho.echo.threads.generators import global_generators_kept


def draw(numbers: int) -> list[Any]:
    """From all of them, also normal numbers, of which NumPy and ``random`` keep every second one."""
    return [
        (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(())))
        for _ in range(numbers)
    ]


def disturb() -> None:
    for number, seed in enumerate((random.seed, np.random.seed, torch.manual_seed)):
        seed(number)
    draw(3)


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_the_global_generators_go_on_where_they_were(before: int, bits: Any) -> None:
    own = np.random.get_bit_generator()
    try:
        streams = []
        for disturbed in (False, True):
            np.random.set_bit_generator(bits(1))
            random.seed(1)
            torch.manual_seed(1)
            drawn = draw(before)
            for _ in range(2 * disturbed):
                with global_generators_kept():
                    np.random.set_bit_generator(np.random.MT19937(8))
                    disturb()
                    inside = draw(2)
                    disturb()
                    with suppress(KeyError), global_generators_kept():
                        disturb()
                        raise KeyError
                    assert draw(2) == inside
            streams.append(drawn + draw(3))
        assert streams[0] == streams[1]
    finally:
        np.random.set_bit_generator(own)
