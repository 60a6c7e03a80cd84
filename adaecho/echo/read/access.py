"""Datasets of others in threads: a copy for each, or one at a time; and those that draw random numbers."""

import functools
import inspect
import io
import operator
import pickle
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from adaecho.echo.threads.seeded_process import SeededProcess, draws, global_generators_kept, seeded
from adaecho.echo.threads.workers import PoolThread

# A copy for each thread is refused beyond this: what holds its data in memory is quick to read in turns.
_LARGEST_COPY_BYTES = 1 << 28
_TRANSFORMS = ("transform", "transforms", "target_transform")


def may_be_shared(dataset: Any) -> bool:
    """Whether threads may read a dataset together: a plain list or tuple, torch's, or one that says so."""
    declared = getattr(dataset, "thread_safe", None)
    if isinstance(declared, bool):
        return declared
    kind = type(dataset)
    if kind in (list, tuple, range, TensorDataset):
        return True
    inner = _inner(dataset)
    return bool(inner) and all(map(may_be_shared, inner))


def _inner(dataset: Any) -> list[Any]:
    """The datasets that one of torch's is made of."""
    kind = type(dataset)
    if kind is Subset:
        return [dataset.dataset]
    if kind not in (ConcatDataset, StackDataset):
        return []
    inner = dataset.datasets
    return list(inner.values() if isinstance(inner, dict) else inner)


class ThreadCopies:
    """A dataset for several threads: each has a copy, as it was when the iteration began.

    Memory maps are shared. Where it can't be pickled, or is large, its examples are read one at a time.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._turns = threading.Lock()
        self._pickled: bytes | None = None
        self._maps: list[Any] = []
        self._own = threading.local()
        self._hindrance = ""  # not the error: its traceback holds the caller's frames, and these the loader
        self._warned = False

    def begin(self, num_workers: int) -> None:
        """Pickle it, if threads will read."""
        self._own, self._pickled, self._hindrance = threading.local(), None, ""
        if not num_workers:
            return
        try:
            self._pickled, self._maps = _pickled(self._dataset)
            self._loaded()
        except Exception as error:
            self._pickled, self._hindrance = None, str(error) or type(error).__name__

    def warn_of_turns(self) -> None:
        """Warn, once, where several threads have to take turns."""
        if self._hindrance and not self._warned:
            self._warned = True
            warn_caller(_in_turns(self._dataset, self._hindrance))

    def _loaded(self) -> Any:
        assert self._pickled is not None
        return _Unpickler(self._pickled, self._maps).load()

    @contextmanager
    def here(self) -> Iterator[Any]:
        """The dataset for this thread, or the only one while no other thread reads it.

        The one given is never read where it can be copied: a file that it opens then could not be pickled.
        """
        if self._pickled is None:
            with self._turns:
                yield self._dataset
            return
        if not hasattr(self._own, "dataset"):
            self._own.dataset = self._loaded()
        yield self._own.dataset


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _LARGEST_COPY_BYTES:
            raise ValueError(f"it takes more than {_LARGEST_COPY_BYTES >> 20} MiB")
        return super().write(data)


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)
        self.maps: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not np.memmap:
            return None
        self.maps.append(value)
        return len(self.maps) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, maps: list[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._maps = maps

    def persistent_load(self, number: Any) -> Any:
        return self._maps[number]


def _pickled(dataset: Any) -> tuple[bytes, list[Any]]:
    """A dataset without its memory maps, and those."""
    file = _Limited()
    pickler = _Pickler(file)
    pickler.dump(dataset)
    return file.getvalue(), pickler.maps


def _in_turns(dataset: Any, error: str) -> str:
    return (
        f"source: {type(dataset).__name__} can't be copied for each reading thread ({error}), so that its "
        "examples are read one at a time: open files when first needed, leave them out of __getstate__, or "
        "set thread_safe = True on a dataset whose __getitem__ may run in several threads at once; work that "
        "can run beside the reading belongs in decode="
    )


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that made the loader or asked for a batch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("adaecho."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class Drawing:
    """A dataset that draws from the global generators as it reads an example.

    They are seeded for each example, so that its values depend on neither threads nor a resume: in place, and
    given back; or, where threads read, in a process for each of them.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._pickled = b""

    def begin(self, num_workers: int) -> None:
        """Raises ValueError where processes are needed and the dataset can't be pickled for them."""
        if not num_workers:
            return
        try:
            self._pickled = pickle.dumps(functools.partial(operator.getitem, self._dataset))
        except Exception as error:
            raise ValueError(
                f"source: {type(self._dataset).__name__} draws random numbers, so that with num_workers > 0 "
                f"it is read in worker processes, and can't be pickled for them ({error}); move what is "
                "random to augment=, or give num_workers=0"
            ) from error

    def read(self, row: int, key: int) -> Any:
        """One example, with the generators seeded by a key."""
        thread = threading.current_thread()
        if isinstance(thread, PoolThread):
            if self not in thread.helpers:
                dataset = SeededProcess(self._pickled, "the dataset", "a dataset that draws nothing")
                thread.helpers[self] = dataset
            return thread.helpers[self]([row], [key], _failed)[0]
        with global_generators_kept():
            return seeded(self._dataset.__getitem__, [row], [key], _failed)[0]


def _failed(error: Exception, position: int) -> None:
    """Leave an error as it is: the reader names the example."""


def check_draws(dataset: Any, echo: str) -> bool:
    """Whether a dataset draws from the global generators as it reads an example; warns where it does.

    With ``transform=`` and its like set up to three are read, as some draw for some examples alone; so they
    are where an example can't be read.
    """
    named = _transforms(dataset)
    if not _any_draws(dataset, named):
        return False
    what = f" in its {' and '.join(named)}" if named else ""
    consequence = {
        "example_before_augmentation": (
            "all repeats of an example then show the same draw, which is echoing after augmentation; "
        ),
        "batch": "all repeats of a batch then show the same draws, as batch echoing has it; ",
    }.get(echo, "")
    warn_caller(
        f"source: {type(dataset).__name__} draws random numbers{what} as it reads an example: {consequence}"
        "give the dataset without it, and its transform as EchoLoader(augment=...). Until then the "
        "generators of random, NumPy and torch are seeded for each example, and num_workers read in as many "
        "processes"
    )
    return True


def _any_draws(dataset: Any, named: list[str]) -> bool:
    read = False
    for row in dict.fromkeys([0, len(dataset) // 2, len(dataset) - 1]):
        try:
            if draws(lambda row=row: dataset[row]):  # type: ignore[misc]
                return True
        except Exception:
            continue  # a bad example, or one that can't be read now: reading it will tell
        read = True
        if not named:
            break
    return bool(named) and not read


def _transforms(dataset: Any) -> list[str]:
    """The transforms that are set, of a dataset or those it is made of; a method of that name is none."""
    given = [name for name in _TRANSFORMS if not inspect.isfunction(getattr(type(dataset), name, None))]
    callables = [name for name in given if callable(getattr(dataset, name, None))]
    if getattr(dataset, "format", None) and isinstance(dataset.format, dict):
        callables += ["set_transform"] if dataset.format.get("type") == "custom" else []
    for inner in _inner(dataset):
        callables += [name for name in _transforms(inner) if name not in callables]
    return callables
