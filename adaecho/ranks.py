"""The ranks of one run: processes that each read a share of the data and step together.

What decides a run (counts, signals, metrics) goes from memory to memory by gloo, and no GPU is waited for;
gradients and statistics go by the device's own backend. Every method is collective: all ranks call it, in the
same order. With one rank nothing is sent.
"""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from adaecho.config.launched import launched_ranks, started_by_torchrun
from adaecho.errors import RankError

_T = TypeVar("_T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 5e-3  # between looks for a message
_LOOK_S = 0.5  # between looks whether the launcher lives
_PAUSE_S = 0.05  # between looks for the others at the start
_PARENT = os.getppid()  # as early as possible: of a launcher that has gone nothing tells
_GRACE_S = 30.0  # as long as torchrun gives


@dataclass
class Ranks:
    """One rank's view of all.

    Attributes:
        rank: from 0.
        world_size: how many.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes records and prints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank."""
        return self.world_size == 1

    def share(self, number: int) -> range:
        """This rank's part of ``range(number)``: neighbours, each in one part alone, sizes within 1."""
        begin, end = (number * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return range(begin, end)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers (float64) of each rank, by rank."""
        if self.is_alone:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        parts = mine.new_empty(self.world_size, len(mine))
        self._together(lambda: self._wait(dist.all_gather(list(parts), mine, async_op=True)))
        return parts.tolist()

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Each number's sum over ranks, in float64 (whole numbers exactly); as they are with one rank."""
        if self.is_alone:
            return list(numbers)
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]

    def gather_objects(self, mine: _T) -> list[_T]:
        """What each rank gives, by rank, to every rank; pickled, so of plain types and tensors."""
        if self.is_alone:
            return [mine]
        parts: list[Any] = [None] * self.world_size
        self._once_all_are_here(lambda: dist.all_gather_object(parts, mine))
        return parts

    def gather_on_first(self, mine: _T) -> list[_T] | None:
        """What each rank gives, by rank, to rank 0; None to the others."""
        if self.is_alone:
            return [mine]
        parts: list[Any] | None = [None] * self.world_size if self.is_first else None
        self._once_all_are_here(lambda: dist.gather_object(mine, parts))
        return parts

    def from_first(self, made: Callable[[], _T]) -> _T:
        """What rank 0 makes, to all ranks."""
        if self.is_alone:
            return made()
        content: list[Any] = [made() if self.is_first else None]
        self._once_all_are_here(lambda: dist.broadcast_object_list(content, src=0))
        return content[0]  # type: ignore[no-any-return]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on the tensor's device and the same on every rank; the tensor itself stays."""
        if self.is_alone:
            return tensor
        total = tensor.detach().clone()
        self._together(lambda: dist.all_reduce(total))
        return total

    def check_same(self, facts: dict[str, str]) -> None:
        """Check that all ranks see the same things.

        Args:
            facts: name of a thing, what this rank sees of it.

        Raises:
            RankError: on every rank; names the first rank that differs from rank 0, and in what.
        """
        seen = self.gather_objects(facts)
        for rank, theirs in enumerate(seen):
            for name, value in theirs.items():
                if value != seen[0].get(name):
                    error = RankError(
                        f"rank {rank} sees another {name} than rank 0: {value} against {seen[0].get(name)}; "
                        "start all ranks with the same command, code and data"
                    )
                    error.told_elsewhere = not self.is_first  # all know it, and one shows it
                    raise error

    def _once_all_are_here(self, send: Callable[[], Any]) -> None:
        """What can only be waited for in one piece."""
        self.gather([0.0])
        self._together(send)

    def _wait(self, work: Any) -> None:
        """Look again and again whether a message has come, so that signals are heard meanwhile."""
        pause_s = _FIRST_PAUSE_S
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        work.wait()

    def _together(self, send: Callable[[], Any]) -> None:
        try:
            send()
        except RuntimeError as error:
            raise explained(error) from error


ALONE = Ranks()


def explained(error: BaseException) -> BaseException:
    """The error itself, or in place of one that came of another rank what to look for.

    Each rank shows its own error, and the launcher which of them ended first, and how.
    """
    # torch has no class of its own for gloo's.
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error)):
        return RankError(
            "another rank failed, hangs or is gone: its own message or the launcher's report says why "
            f"({str(error).splitlines()[0]})"
        )
    return error


def _end_with(launcher: int) -> None:
    """End this rank when its launcher is killed: it would go on unseen, and hold the run's folder.

    As at a scheduler's signal: the step ends and a checkpoint is written, unless that takes too long.
    """
    while os.getppid() == launcher:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _of_this_attempt(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """The part of the store that only the ranks alive now use.

    After a restart torchrun's store may still hold the addresses of processes that are gone, and gloo would
    call them. Rank 0 asks a new question; each rank answers the last one asked with a name of its own; whom
    rank 0 has heard, it lists under the question.

    Raises:
        RuntimeError: some do not answer in time.
    """
    mine, until = uuid.uuid4().hex, time.monotonic() + timeout_s
    question = mine
    if rank == 0:
        store.set("question", question)
    names: list[str] = []
    while mine not in names:
        if rank > 0:
            question = store.get("question").decode()
        store.set(f"answer/{rank}", f"{question} {mine}")
        if rank == 0:
            answers = [store.get(f"answer/{other}").decode().split() for other in range(world_size)]
            if all(asked == question for asked, _ in answers):
                store.set(question, " ".join(name for _, name in answers))
        if store.check([question]):
            names = store.get(question).decode().split()
        if time.monotonic() > until:
            raise RuntimeError(f"not all of {world_size} ranks came within {timeout_s:g} s")
        if mine not in names:
            time.sleep(_PAUSE_S)
    return PrefixStore(question, store)


@contextmanager
def joined(device: torch.device, timeout_s: float) -> Iterator[Ranks]:
    """This process among the ranks that torchrun's environment names, inside the block; alone without any.

    Args:
        device: of the model: its backend reduces gradients.
        timeout_s: how long ranks wait for one another before the run fails.

    Raises:
        RankError: the others do not come.
    """
    if started_by_torchrun():
        threading.Thread(target=_end_with, args=(_PARENT,), daemon=True).start()
    if launched_ranks() == 1:
        yield ALONE
        return
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
        store = _of_this_attempt(store, rank, world_size, timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (dist.DistError, ValueError, RuntimeError) as error:
        raise RankError(f"the ranks do not find each other: {str(error).splitlines()[0]}") from error
    try:
        yield Ranks(rank, world_size)
    finally:
        with suppress(RuntimeError):  # of a broken connection
            dist.destroy_process_group()
