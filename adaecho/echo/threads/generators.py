"""Functions that draw from the global generators, seeded for each example.

A thread must not touch those generators: there, processes do it (``threads.processes``).
"""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_others: list[np.random.MT19937] = []  # for NumPy to draw from while its own is put aside
own = False  # nobody else uses those of this process
Keys = list[int]
Failed = Callable[[Exception, int], None]
"""Called with what a function raised and which of its examples it raised it for."""


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Give the global generators of torch, NumPy and ``random`` back as they were.

    Inside, NumPy draws from another one: to exchange the two takes a hundredth of the time of a new state.
    """
    if own:
        yield
        return
    python, torch_state = random.getstate(), torch.get_rng_state()
    # Beside its generator NumPy keeps the second of the last two normal numbers, which an exchange loses.
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    given = mtrand.get_bit_generator()
    other = _others.pop() if _others else np.random.MT19937(0)
    try:
        mtrand.set_bit_generator(other)
        yield
    finally:
        mtrand.set_bit_generator(given)
        if legacy["has_gauss"]:
            np.random.set_state(legacy)
        random.setstate(python)
        torch.set_rng_state(torch_state)
        _others.append(other)


def draws(function: Callable[[], Any]) -> bool:
    """Whether calling a function moves a global generator on; they are given back as they were."""
    with global_generators_kept():
        before = _states()
        function()
        return _states() != before


def _states() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


def seeded(augment: Callable[[Any], Any], examples: list[Any], drawn: Keys, failed: Failed) -> list[Any]:
    """Each example augmented, with the global generators of torch, NumPy and ``random`` seeded by its key."""

    def with_generators(example: Any, key: int) -> Any:
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        torch.default_generator.manual_seed(key >> 1)
        return augment(example)

    return one_by_one(with_generators, examples, drawn, failed)


def one_by_one(
    augment: Callable[[Any, Any], Any], examples: list[Any], drawn: Iterable[Any], failed: Failed
) -> list[Any]:
    """Each example augmented with its key; ``failed`` is told which of them an exception is of."""
    augmented: list[Any] = []
    try:
        for example, key in zip(examples, drawn, strict=True):
            augmented.append(augment(example, key))
    except Exception as error:
        failed(error, len(augmented))
        raise
    return augmented
