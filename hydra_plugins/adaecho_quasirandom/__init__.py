"""Hydra plugins: ``hydra/sweeper=quasirandom`` and ``hydra/launcher=slurm``.

Every Hydra app on the machine imports this file, so it must import quickly.
"""

# Do not add "from __future__ import annotations". With it, the dataclass decorator looks up the module in
# sys.modules, but Hydra 1.3 executes a plugin before it adds the plugin there.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from adaecho.config.slurm import SlurmSettings


@dataclass
class QuasirandomConf:
    """The config of the sweeper, which has no settings. The keys ``search.*`` configure the sweep."""

    _target_: str = "hydra_plugins.adaecho_quasirandom.QuasirandomSweeper"


@dataclass
class SlurmConf(SlurmSettings):
    """The Slurm settings of the launcher. The sweeper reads them and submits the jobs."""

    _target_: str = "hydra_plugins.adaecho_quasirandom.SlurmLauncher"


for _group, _name, _node in (
    ("hydra/sweeper", "quasirandom", QuasirandomConf),
    ("hydra/launcher", "slurm", SlurmConf),
):
    ConfigStore.instance().store(group=_group, name=_name, node=_node, provider="adaecho")


class QuasirandomSweeper(Sweeper):
    """A Hydra sweeper that runs sweeps with ``adaecho.search``."""

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,  # noqa: ARG002
        config: DictConfig,
    ) -> None:
        """Store the config of the sweep."""
        self._config_loader, self._config = hydra_context.config_loader, config

    def sweep(self, arguments: Sequence[str]) -> None:
        """Run or continue the sweep that the command-line overrides define."""
        from adaecho.search.sweeper import sweep

        sweep(self._config, self._config_loader, arguments)


class SlurmLauncher(Launcher):
    """A Hydra launcher that only holds the Slurm settings. The quasirandom sweeper submits the jobs."""

    def __init__(self, **settings: Any) -> None:
        """Accept the Slurm settings that Hydra passes."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Do nothing, because the sweeper submits the jobs."""

    def launch(
        self,
        job_overrides: Sequence[Sequence[str]],  # noqa: ARG002
        initial_job_idx: int,  # noqa: ARG002
    ) -> Sequence[JobReturn]:
        """Raise an error, because another sweeper has called this launcher."""
        from adaecho.errors import ConfigError

        raise ConfigError("hydra/launcher=slurm: needs hydra/sweeper=quasirandom")
