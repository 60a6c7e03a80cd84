"""A process for an ``augment`` that draws from the global generators, which a thread must not touch.

Each worker thread that needs one has its own, started when first used and ended with the thread.
"""

import multiprocessing
import pickle
import random
import signal
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

Keys = list[int]
Failed = Callable[[Exception, int], None]
"""Called with what an augmentation raised and which of its examples it raised it for."""


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


class AugmentProcess:
    """Runs ``seeded`` elsewhere.

    Args:
        pickled_augment: what to run, pickled.
    """

    def __init__(self, pickled_augment: bytes) -> None:
        # Not forked: this process has threads, whose locks a fork would copy as they are.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, pickled_augment), name="adaecho-augment", daemon=True
        )
        self._process.start()
        theirs.close()

    def __call__(self, examples: list[Any], drawn: Keys, failed: Failed) -> list[Any]:
        """As ``seeded``.

        Raises:
            RuntimeError: the process has died.
        """
        try:
            # Pickled here: a Connection would hand over tensors as shared memory, file by file.
            self._connection.send_bytes(pickle.dumps((examples, drawn)))
            good, result = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join(1)
            raise RuntimeError(
                f"the worker process of augment ended with exit code {self._process.exitcode}. It imports "
                'the main script, whose own work must stand under if __name__ == "__main__":. '
                "num_workers=0 and augment(example, rng) need no process"
            ) from error
        if good:
            augmented: list[Any] = result
            return augmented
        raised, where, position = result
        raised.add_note(f"in a worker process of augment:\n{where}")
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


def _serve(connection: Connection, pickled_augment: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks; the pipe's end is the end
    torch.set_num_threads(1)
    augment = pickle.loads(pickled_augment)
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
