"""``hydra/sweeper=quasirandom``: the entry that Hydra finds.

Every Hydra app on the machine imports it, so it imports nothing heavy. No ``from __future__ import
annotations`` here: Hydra 1.3 executes a plugin before it is in ``sys.modules``, and dataclasses with such
annotations then fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class QuasirandomConf:
    """The sweeper has no settings of its own: they are keys of ``search``."""

    _target_: str = "hydra_plugins.adaecho_quasirandom.QuasirandomSweeper"


ConfigStore.instance().store(
    group="hydra/sweeper", name="quasirandom", node=QuasirandomConf, provider="adaecho"
)


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
