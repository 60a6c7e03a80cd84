"""``hydra/sweeper=quasirandom`` and ``hydra/launcher=slurm``: the entries that Hydra finds.

Every Hydra app on the machine imports them, so they import nothing heavy. No ``from __future__ import
annotations`` here: Hydra 1.3 executes a plugin before it is in ``sys.modules``, and dataclasses with such
annotations then fail.
"""

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
    """The sweeper has no settings of its own: they are keys of ``search``."""

    _target_: str = "hydra_plugins.adaecho_quasirandom.QuasirandomSweeper"


@dataclass
class SlurmConf(SlurmSettings):
    """Of the launcher, which the sweeper reads."""

    _target_: str = "hydra_plugins.adaecho_quasirandom.SlurmLauncher"


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
