"""The ranks of one run: processes that each read a share of the data and step together.

What decides a run (counts, signals, metrics) goes from memory to memory by gloo, and no GPU is waited for;
gradients and statistics go by the device's own backend. Every method is collective: all ranks call it, in the
same order. With one rank nothing is sent.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from adaecho.config.launched import launched_ranks
from adaecho.errors import UserError

_T = TypeVar("_T")
_REPORT_S = 3.0  # for the others to say why they left, before a rank is called gone
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 5e-3  # between looks for a message
_LOOK_S = 0.5  # between looks for a rank that failed


class RankError(UserError):
    """Another rank failed, is gone, or sees something else; names it."""


@dataclass
class Ranks:
    """One rank's view of all.

    Attributes:
        rank: from 0.
        world_size: how many.
    """

    rank: int = 0
    world_size: int = 1
    _store: Any = None

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
        parts = mine.new_empty(self.world_size * len(mine))
        self._together(lambda: self._wait(dist.all_gather_into_tensor(parts, mine, async_op=True)))
        return parts.view(self.world_size, -1).tolist()

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
        self._meet()
        self._together(lambda: dist.all_gather_object(parts, mine))
        return parts

    def gather_on_first(self, mine: _T) -> list[_T] | None:
        """What each rank gives, by rank, to rank 0; None to the others."""
        if self.is_alone:
            return [mine]
        parts: list[Any] | None = [None] * self.world_size if self.is_first else None
        self._meet()
        self._together(lambda: dist.gather_object(mine, parts))
        return parts

    def from_first(self, made: Callable[[], _T]) -> _T:
        """What rank 0 makes, to all ranks."""
        if self.is_alone:
            return made()
        content: list[Any] = [made() if self.is_first else None]
        self._meet()
        self._together(lambda: dist.broadcast_object_list(content, src=0))
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
                    raise RankError(
                        f"rank {rank} sees another {name} than rank 0: {value} against {seen[0].get(name)}; "
                        "start all ranks with the same command, code and data"
                    )

    def _meet(self) -> None:
        """Wait until all ranks are here: before what can only be waited for in one piece."""
        self.gather([0.0])

    def _wait(self, work: Any) -> None:
        """Look again and again whether a message has come, so that signals are heard meanwhile.

        Raises:
            RankError: a rank that is waited for has failed.
        """
        pause_s, looked = _FIRST_PAUSE_S, time.monotonic()
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                if (failure := self._failure()) is not None:
                    raise failure
        work.wait()

    def _together(self, send: Callable[[], Any]) -> None:
        try:
            send()
        except RuntimeError as error:
            raise self.explain(error) from error

    def explain(self, error: BaseException) -> BaseException:
        """Why this rank can't go on: its own error, which the others are told, or theirs, if one has told.

        A rank whose connection broke waits ``_REPORT_S`` for the others' words. Those that neither failed nor
        lost a connection themselves are gone (killed) or hang.
        """
        if self.is_alone or isinstance(error, RankError) or self._store is None:
            return error
        with suppress(RuntimeError):  # the store went with rank 0's host
            if not _is_of_connection(error):
                self._store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}")
                self._store.set(f"has read/{self.rank}", "")
                return error
            self._store.set(f"cut off/{self.rank}", "")
            silent = self._wait_for("failed", "cut off")
            if (failure := self._failure()) is not None:
                return failure
            self._store.set(f"has read/{self.rank}", "")
            names = ", ".join(map(str, silent))
            word = "rank" if len(silent) == 1 else "ranks"
            return RankError(f"no word from {word} {names}: killed, hanging, or waiting for one that is")
        return RankError("rank 0 is gone, and with it what the ranks tell one another")

    def _failure(self) -> RankError | None:
        """What a rank that failed has told, if one has."""
        for rank in range(self.world_size):
            if self._store.check([f"failed/{rank}"]):
                said = self._store.get(f"failed/{rank}").decode()
                self._store.set(f"has read/{self.rank}", "")
                return RankError(f"rank {rank} failed: {said}")
        return None

    def leave(self, failed: bool) -> None:
        """Close the connections; rank 0, which may keep the store, first hears why the others leave."""
        with suppress(RuntimeError):  # of a broken connection
            if dist.is_initialized():
                dist.destroy_process_group()
            if failed and self.is_first:
                self._wait_for("has read")

    def _wait_for(self, *words: str) -> list[int]:
        """The other ranks that have put none of these words into the store within ``_REPORT_S``."""
        until = time.monotonic() + _REPORT_S
        silent = [rank for rank in range(self.world_size) if rank != self.rank]
        while True:
            silent = [
                rank for rank in silent if not any(self._store.check([f"{word}/{rank}"]) for word in words)
            ]
            if not silent or time.monotonic() > until:
                return silent
            time.sleep(0.1)


ALONE = Ranks()


def _is_of_connection(error: BaseException) -> bool:
    """Whether it came of another rank: torch has no class of its own for gloo's."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


@contextmanager
def joined(device: torch.device, timeout_s: float) -> Iterator[Ranks]:
    """This process among the ranks that torchrun's environment names, inside the block; alone without any.

    Args:
        device: of the model: its backend reduces gradients.
        timeout_s: how long ranks wait for one another before the run fails.

    Raises:
        RankError: the others do not come.
    """
    if launched_ranks() == 1:
        yield ALONE
        return
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (dist.DistError, ValueError, RuntimeError) as error:
        raise RankError(f"the ranks do not find each other: {str(error).splitlines()[0]}") from error
    ranks = Ranks(rank, world_size, PrefixStore("adaecho", store))
    try:
        yield ranks
    except BaseException:
        ranks.leave(failed=True)
        raise
    ranks.leave(failed=False)
