"""``hydra/sweeper=quasirandom`` and ``hydra/launcher=slurm``: the entries that Hydra finds.

Every Hydra app on the machine imports them, so they import nothing heavy. No ``from __future__ import
annotations`` here: Hydra 1.3 executes a plugin before it is in ``sys.modules``, and dataclasses with such
annotations then fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class QuasirandomConf:
    """The sweeper has no settings of its own: they are keys of ``search``."""

    _target_: str = "hydra_plugins.adaecho_quasirandom.QuasirandomSweeper"


@dataclass
class SlurmConf:
    """Defaults that any cluster takes: one CPU, no GPU, no partition or account."""

    _target_: str = "hydra_plugins.adaecho_quasirandom.SlurmLauncher"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    timeout_min: int = 60  # of a job; a trial that is cut short goes on in the next
    nodes: int = 1  # nodes x tasks_per_node ranks train each trial of a job together
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    mem_gb: float = 2.0  # per node
    gpus_per_node: int | None = None
    trials_per_job: int = 1  # one job is submitted for so many: packs short trials
    array_parallelism: int = 256  # jobs at most
    max_num_timeout: int = 20  # how often a job may be requeued after its time was up
    signal_delay_s: int = 120  # time to end a step and write a checkpoint before the limit
    setup: list[str] = field(default_factory=list)  # shell lines before the job, e.g. module load
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # other sbatch options
    wait: bool = True  # false submits and returns


for _group, _name, _node in (
    ("hydra/sweeper", "quasirandom", QuasirandomConf),
    ("hydra/launcher", "slurm", SlurmConf),
):
    ConfigStore.instance().store(group=_group, name=_name, node=_node, provider="adaecho")


class QuasirandomSweeper(Sweeper):
    """Hands a sweep over to ``adaecho.search``."""

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,  # noqa: ARG002
        config: DictConfig,
    ) -> None:
        """Keep what a sweep needs; ``task_function`` runs single runs only."""
        self._config_loader, self._config = hydra_context.config_loader, config

    def sweep(self, arguments: Sequence[str]) -> None:
        """Run, or continue, the sweep that these overrides describe."""
        from adaecho.search.sweeper import sweep

        sweep(self._config, self._config_loader, arguments)


class SlurmLauncher(Launcher):
    """Only names the settings: the sweeper submits its trials itself, so other sweepers can't use it."""

    def __init__(self, **settings: Any) -> None:
        """Takes the settings that Hydra passes on."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Nothing to prepare."""

    def launch(
        self,
        job_overrides: Sequence[Sequence[str]],  # noqa: ARG002
        initial_job_idx: int,  # noqa: ARG002
    ) -> Sequence[JobReturn]:
        """Refuses."""
        from adaecho.errors import ConfigError

        raise ConfigError("hydra/launcher=slurm: needs hydra/sweeper=quasirandom")
