"""Communication between the ranks (processes) of one distributed run.

Metrics and counts are exchanged by gloo, and gradients by the backend of the model's device. Every method is
a collective operation: all ranks must call the same methods in the same order.
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
    """The rank of this process, and the collective operations of a run."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which is the only rank that prints and writes records."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether the run has a single rank."""
        return self.world_size == 1

    def share(self, number: int) -> range:
        """Return this rank's share of ``range(number)``, as a contiguous range."""
        begin, end = (number * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return range(begin, end)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank as float64, in the order of the ranks."""
        if self.is_alone:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        parts = mine.new_empty(self.world_size, len(mine))
        dist.all_gather(list(parts), mine)
        return parts.tolist()

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each number over all ranks, as float64."""
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]

    def gather_objects(self, mine: _T) -> list[_T]:
        """Return the objects of all ranks, in the order of the ranks. The objects must be picklable."""
        if self.is_alone:
            return [mine]
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, mine)
        return parts

    def from_first(self, make: Callable[[], _T]) -> _T:
        """Call ``make`` on rank 0 only, and return its result on every rank. The result must be picklable."""
        if self.is_alone:
            return make()
        content: list[Any] = [make() if self.is_first else None]
        dist.broadcast_object_list(content, src=0)
        return content[0]  # type: ignore[no-any-return]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks, on every rank. The argument is not changed."""
        if self.is_alone:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def check_same(self, facts: dict[str, str]) -> None:
        """Raise a ``RankError`` on all ranks if a value differs between ranks, such as a hash of the config.

        Args:
            facts: this rank's values. The error message names the key of a value that differs.
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
    """Return a ``RankError`` if the connection to another rank broke, otherwise the given error."""
    # Recognize gloo's errors by their text, because torch raises them as plain RuntimeErrors.
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower()):
        reason = str(error).splitlines()[0]
        return RankError(f"another rank failed, hung or exited; see its message ({reason})")
    return error


@contextmanager
def distributed_context(device: torch.device, timeout_s: float) -> Iterator[DistributedContext]:
    """Connect the ranks (processes) of a distributed run while the ``with`` block runs.

    Without torchrun's environment variables, the run consists of this process alone.

    Args:
        device: the device of the model. Gradients are averaged by gloo on a CPU, and by NCCL on a GPU.
        timeout_s: seconds that ranks wait for each other before the run fails.

    Raises:
        RankError: another rank does not connect, or the connection to it breaks.
    """
    if launched_ranks() == 1:
        yield SINGLE_PROCESS
        return
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
        # Use a different prefix after each restart, because torchrun's store still contains the addresses of
        # the previous processes.
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        yield DistributedContext(rank, world_size)
    except Exception as error:
        raise explained(error) from error
    finally:
        with suppress(Exception):  # a broken connection cannot be closed
            dist.destroy_process_group()
