"""The ranks of one run: processes that each read a share of the data and step together.

What decides a run (counts, signals, metrics) goes from memory to memory by gloo, and no GPU is waited for;
gradients and statistics go by the device's own backend. Every method is collective: all ranks call it, in the
same order. With one rank nothing is sent.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from adaecho.config.launch_env import launched_ranks
from adaecho.errors import RankError

_T = TypeVar("_T")


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
        dist.all_gather(list(parts), mine)
        return parts.tolist()

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Each number's sum over ranks, in float64: whole numbers exactly."""
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]

    def gather_objects(self, mine: _T) -> list[_T]:
        """What each rank gives, by rank, to every rank; pickled."""
        if self.is_alone:
            return [mine]
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, mine)
        return parts

    def from_first(self, made: Callable[[], _T]) -> _T:
        """What rank 0 makes, to all ranks; pickled."""
        if self.is_alone:
            return made()
        content: list[Any] = [made() if self.is_first else None]
        dist.broadcast_object_list(content, src=0)
        return content[0]  # type: ignore[no-any-return]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on the tensor's device and the same on every rank; the tensor itself stays."""
        if self.is_alone:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def check_same(self, facts: dict[str, str]) -> None:
        """Check that all ranks see the same things.

        Args:
            facts: name of a thing, what this rank sees of it.

        Raises:
            RankError: on every rank; names the first rank that differs from rank 0, and in what.
        """
        first, *others = self.gather_objects(facts)
        for rank, theirs in enumerate(others, start=1):
            for name in {**first, **theirs}:
                if theirs.get(name) != first.get(name):
                    raise RankError(
                        f"rank {rank} sees another {name} than rank 0: {theirs.get(name)} against "
                        f"{first.get(name)}; start all ranks with the same command, code and data"
                    )


ALONE = Ranks()


def explained(error: BaseException) -> BaseException:
    """The error itself, or in place of one that came of another rank what to look for."""
    # torch has no class of its own for gloo's.
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower()):
        return RankError(
            "another rank failed, hangs or is gone: its own message or the launcher's report says why "
            f"({str(error).splitlines()[0]})"
        )
    return error


@contextmanager
def joined(device: torch.device, timeout_s: float) -> Iterator[Ranks]:
    """This process among the ranks that torchrun's environment names, inside the block; alone without any.

    Args:
        device: of the model: its backend reduces gradients.
        timeout_s: how long ranks wait for one another before the run fails.

    Raises:
        RankError: the others do not come, or are gone.
    """
    if launched_ranks() == 1:
        yield ALONE
        return
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
        # After a restart torchrun's store still holds the addresses of the processes before.
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        yield Ranks(rank, world_size)
    except Exception as error:
        raise explained(error) from error
    finally:
        with suppress(Exception):  # of a broken connection
            dist.destroy_process_group()
