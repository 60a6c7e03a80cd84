"""Communication between the ranks of one run.

Each rank is a process that reads its share of the data; all ranks step together. Counts, signals and metrics
travel between CPUs by gloo, so they never wait for a GPU. Gradients and statistics use the backend of the
device. Every method is collective: all ranks call it in the same order. A single process sends nothing.
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
class DistributedContext:
    """The rank of this process and the collective operations of a run.

    Attributes:
        rank: from 0.
        world_size: number of ranks.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only rank that writes records and prints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether the run has a single rank."""
        return self.world_size == 1

    def share(self, number: int) -> range:
        """This rank's share of ``range(number)``: a contiguous range; the sizes differ by at most 1."""
        begin, end = (number * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return range(begin, end)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank as float64, by rank."""
        if self.is_alone:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        parts = mine.new_empty(self.world_size, len(mine))
        dist.all_gather(list(parts), mine)
        return parts.tolist()

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over ranks, in float64: whole numbers are exact."""
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]

    def gather_objects(self, mine: _T) -> list[_T]:
        """The objects of every rank, by rank, on every rank; pickled."""
        if self.is_alone:
            return [mine]
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, mine)
        return parts

    def from_first(self, make: Callable[[], _T]) -> _T:
        """Call ``make`` on rank 0 and return its result on every rank; pickled."""
        if self.is_alone:
            return make()
        content: list[Any] = [make() if self.is_first else None]
        dist.broadcast_object_list(content, src=0)
        return content[0]  # type: ignore[no-any-return]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over ranks, equal on every rank; the tensor itself is unchanged."""
        if self.is_alone:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def check_same(self, facts: dict[str, str]) -> None:
        """Check that all ranks have the same facts, by name.

        Raises:
            RankError: on every rank; names the first rank that differs from rank 0, and the fact.
        """
        first, *others = self.gather_objects(facts)
        for rank, theirs in enumerate(others, start=1):
            for name in {**first, **theirs}:
                if theirs.get(name) != first.get(name):
                    raise RankError(
                        f"rank {rank} has a different {name} than rank 0: {theirs.get(name)} instead of "
                        f"{first.get(name)}; start all ranks with the same command, code and data"
                    )


SINGLE_PROCESS = DistributedContext()


def explained(error: BaseException) -> BaseException:
    """The error itself, or a ``RankError`` if the connection to another rank broke."""
    # torch raises gloo's errors as plain RuntimeErrors.
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower()):
        reason = str(error).splitlines()[0]
        return RankError(f"another rank failed, hangs or is gone; see its own message ({reason})")
    return error


@contextmanager
def distributed_context(device: torch.device, timeout_s: float) -> Iterator[DistributedContext]:
    """Join the ranks that torchrun's environment variables name; a single process without them.

    Args:
        device: of the model; its backend reduces gradients.
        timeout_s: how long ranks wait for each other before the run fails.

    Raises:
        RankError: another rank does not connect, or its connection broke.
    """
    if launched_ranks() == 1:
        yield SINGLE_PROCESS
        return
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
        # After a restart torchrun's store still holds the addresses of the previous processes.
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        yield DistributedContext(rank, world_size)
    except Exception as error:
        raise explained(error) from error
    finally:
        with suppress(Exception):  # a broken connection cannot be closed
            dist.destroy_process_group()
