"""Functions that draw from the global generators, seeded for each example: in place, or in a process.

A thread must not touch those generators, so each worker thread that needs one has a process of its own,
started when first used and ended with the thread.
"""

import multiprocessing
import pickle
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from adaecho.echo.threads.workers import PoolThread

_LOOK_EVERY_S = 0.5  # whether the loader is being closed
_others: list[np.random.MT19937] = []  # for NumPy to draw from while its own is put aside

# Not forked: this process has threads, whose locks a fork would copy as they are.
_PROCESSES = multiprocessing.get_context("spawn")
Keys = list[int]
Failed = Callable[[Exception, int], None]
"""Called with what a function raised and which of its examples it raised it for."""


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Give the global generators of torch, NumPy and ``random`` back as they were.

    Inside, NumPy draws from another one: to exchange the two takes a hundredth of the time of a new state.
    """
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


class ProcessDiedError(RuntimeError):
    """A worker process ended by itself or was killed, whatever example it was about to read."""


class SeededProcess:
    """Runs ``seeded`` elsewhere.

    Args:
        pickled: the function to run.
        name: of what is run, in messages.
        remedy: what needs no process.
    """

    def __init__(self, pickled: bytes, name: str, remedy: str) -> None:
        self._name, self._remedy = name, remedy
        self._connection, other_end = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(
            target=_serve, args=(other_end, pickled), name=f"adaecho-{name}", daemon=True
        )
        self._process.start()
        other_end.close()

    def __call__(self, examples: list[Any], drawn: Keys, failed: Failed) -> list[Any]:
        """Run it there, as ``seeded`` does here.

        Raises:
            ProcessDiedError: it has.
        """
        try:
            # Pickled here: a Connection would hand over tensors as shared memory, file by file.
            self._connection.send_bytes(pickle.dumps((examples, drawn)))
            while not self._connection.poll(_LOOK_EVERY_S):  # it may take its time to start
                thread = threading.current_thread()
                if isinstance(thread, PoolThread):
                    thread.check_open()
            good, result = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join(1)
            raise ProcessDiedError(
                f"the worker process of {self._name} ended with exit code {self._process.exitcode}. It "
                'imports the main script, whose own work must stand under if __name__ == "__main__":. '
                f"num_workers=0 and {self._remedy} need no process"
            ) from error
        if good:
            augmented: list[Any] = result
            return augmented
        raised, where, position = result
        raised.add_note(f"in a worker process of {self._name}:\n{where}")
        failed(raised, position)
        raise raised

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(connection: Connection, pickled: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks; the pipe's end is the end
    torch.set_num_threads(1)
    augment = pickle.loads(pickled)
    while True:
        try:
            examples, drawn = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_answer(augment, examples, drawn)))


def _answer(augment: Callable[[Any], Any], examples: list[Any], drawn: Keys) -> tuple[bool, Any]:
    positions: list[int] = []
    try:
        return True, seeded(augment, examples, drawn, lambda _, position: positions.append(position))
    except Exception as error:
        return False, (_sendable(error), traceback.format_exc(), positions[0])


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
