"""The processes that run a worker's trials: one, or the tasks of a Slurm job, each a rank of every trial."""

import gc
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaecho.config.schema import from_plain
from adaecho.errors import ConfigError, RankError, UserError
from adaecho.records.lock import FolderInUseError
from adaecho.records.status import Status
from adaecho.search.state import DataSeen, Pruner

if TYPE_CHECKING:
    from adaecho.ranks import Ranks  # imports torch, which a worker's launcher need not wait for

# Below the ports that systems give to outgoing connections (Linux: from 32768), for so many jobs of one host.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000


class PreemptedError(Exception):
    """A signal, which ``signal`` names, ended the trial, or came when its outcome was decided."""

    def __init__(self, signal: str | None) -> None:
        super().__init__(signal)
        self.signal = signal


@dataclass(frozen=True)
class Order:
    """What rank 0 tells the others to train."""

    name: str
    config: dict[str, Any]
    folder: Path
    overrides: Sequence[str]


class Team:
    """One worker's processes; every method but ``follow`` is rank 0's, or that of the only process.

    Args:
        runner: ``module:function`` that runs a trial.
        typed: tasks and callbacks that the user has named; see ``config.schema.from_plain``.
        ranks: None for one process.
    """

    def __init__(self, runner: str, typed: Collection[str] = (), ranks: "Ranks | None" = None) -> None:
        self._runner, self._typed, self._ranks = runner, typed, ranks

    @property
    def is_first(self) -> bool:
        """Whether this process chooses the trials."""
        return self._ranks is None or self._ranks.is_first

    @property
    def ends_at_failure(self) -> bool:
        """Whether a crash of one process leaves the others where they can't go on together."""
        return self._ranks is not None

    def train(self, order: Order) -> dict[str, Any]:
        """Run a trial with all ranks; its summary. Errors are those of ``run_trial``."""
        self.tell(order)
        return self._run(order)

    def pause(self, pause_s: float) -> None:
        """Sleep, all ranks at once: one that waited for another would call it gone at ``rank_timeout_s``."""
        self.tell(pause_s)
        time.sleep(pause_s)

    def follow(self) -> None:
        """Do what rank 0 says until it is over.

        Raises:
            PreemptedError: a signal ended a trial.
            RankError: another rank failed.
            UserError: the trial met what only the user can mend, on this rank.
        """
        assert self._ranks is not None
        while (order := self._ranks.from_first(_nothing)) is not None:
            if isinstance(order, float):
                time.sleep(order)
                continue
            with suppress(FolderInUseError):  # all ranks hear of it, and go on
                self._follow(order)

    def _follow(self, order: Order) -> None:
        try:
            summary = self._run(order)
        except (FolderInUseError, RankError):
            raise
        except UserError as error:
            raise UserError(f"trial {order.name}: {error}") from error
        check_signal(summary)

    def tell(self, what: Order | float | None) -> None:
        """Tell the other ranks what to do: a trial, a pause in seconds, or None: there are no more trials."""
        if self._ranks is not None:
            self._ranks.from_first(lambda: what)

    def _run(self, order: Order) -> dict[str, Any]:
        config = from_plain(order.config, self._typed)
        pruner = Pruner(order.folder) if config.search.prune else None
        more: dict[str, Any] = {} if self._ranks is None else {"ranks": self._ranks}
        if not self._runner:
            more["check_data"] = DataSeen(order.folder, order.config)
        # A trial's objects refer to one another and to its data: left alone, a dozen data sets pile up.
        gc.collect()
        return load_runner(self._runner)(config, order.folder, order.overrides, prune=pruner, **more)


def check_signal(summary: dict[str, Any]) -> None:
    """Begin no other trial after one that a signal ended, or in whose last evaluation one came.

    Raises:
        PreemptedError: that is how it was.
    """
    if summary["status"] == Status.PREEMPTED or "signal" in summary:
        raise PreemptedError(summary.get("signal"))


def _nothing() -> Order | float | None:
    return None


@contextmanager
def ranks_of_job(
    num_ranks: int, configs: Sequence[dict[str, Any]], typed: Collection[str] = ()
) -> Iterator["Ranks | None"]:
    """The tasks of this Slurm job, joined inside the block; None where each worker is one process.

    Args:
        num_ranks: how many tasks the job has.
        configs: of the sweep's trials: ``device`` and ``rank_timeout_s`` count.
        typed: tasks and callbacks that the user has named.

    Raises:
        ConfigError: the job has other tasks, or a host too few GPUs.
        RankError: the others do not come.
    """
    if num_ranks == 1:
        yield None
        return
    _export_ranks(num_ranks)
    from adaecho.ranks import joined
    from adaecho.training.device import choose_device

    trials = [from_plain(config, typed) for config in configs]
    device = max(map(choose_device, trials), key=lambda device: device.type != "cpu")
    with joined(device, max(trial.rank_timeout_s for trial in trials)) as ranks:
        yield ranks


def _export_ranks(num_ranks: int) -> None:
    """Put into the environment what torchrun would: ranks are Slurm's tasks, and they meet on the first host.

    The port follows from the job's number, which is another one for each job of an array.
    """
    from submitit.helpers import TorchDistributedEnvironment

    os.environ["MASTER_PORT"] = str(_FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % _NUM_PORTS)
    found = TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    if found.world_size != num_ranks:
        raise ConfigError(
            f"hydra.launcher.nodes x tasks_per_node is {num_ranks}, and the job has {found.world_size} "
            "tasks; leave the number of tasks out of hydra.launcher.additional_parameters"
        )


def load_runner(runner: str) -> Callable[..., dict[str, Any]]:
    """The function that ``module:function`` names; without a name a run's own."""
    if not runner:
        from adaecho.training.trial import run_trial

        return run_trial
    module, _, function = runner.partition(":")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]
