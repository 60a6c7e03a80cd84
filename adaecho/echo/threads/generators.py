"""The global generators of torch, NumPy and ``random``: seeded for what draws from them, and given back.

A thread must not touch them: there, processes do it (``threads.processes``).
"""

import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_watching: list[tuple[int, list[str]]] = []  # threads, each with what it has called to put a generator back
_given: list[tuple[Any, str, Callable[..., Any]]] = []  # what these are called by, while any is watched
_watchers = threading.Lock()
_others: list[np.random.MT19937] = []  # for NumPy to draw from while its own is put aside
_RESTORING = (
    (torch, "set_rng_state"), (torch.random, "set_rng_state"), (random, "setstate"), (np.random, "set_state"),
)  # fmt: skip
own = False  # nobody else uses those of this process


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


def tried(function: Callable[[], Any], key: int | None = 0) -> tuple[Any, bool]:
    """What a function returns, and whether it moves a global generator on, or seeds one and puts it back.

    They are seeded by a key for it, and given back as they were; without one, left to it.
    """
    with nullcontext() if key is None else global_generators_kept(), _restored() as restored:
        if key is not None:
            seed_globally(key, key >> 1)
        before = _states()
        result = function()
        return result, bool(restored) or _states() != before


@contextmanager
def _restored() -> Iterator[list[str]]:
    """Names of what this thread calls to put a global generator back, as torchvision's FakeData does."""
    watched = threading.get_ident(), list[str]()
    with _watchers:
        if not _watching:
            _given.extend((module, name, getattr(module, name)) for module, name in _RESTORING)
            for module, name, function in _given:
                setattr(module, name, _told(function, name))
        _watching.append(watched)
    try:
        yield watched[1]
    finally:
        with _watchers:
            _watching[:] = [one for one in _watching if one is not watched]
            while _given and not _watching:
                setattr(*_given.pop())


def _told(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        for thread, restored in _watching:
            if thread == threading.get_ident():
                restored.append(name)
        return function(*arguments, **named)

    return called


def _states() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


def seed_globally(key: int, of_torch: int) -> None:
    """Seed the global generators of NumPy and ``random`` by a key, and torch's, whose seeds are shorter."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(of_torch)
