"""Options of tasks whose models may have virtual (ghost) batch norm."""

from dataclasses import dataclass

from torch import nn

from adaecho.config.bounds import one_of
from adaecho.config.launched import launched_ranks
from adaecho.config.schema import Config
from adaecho.config.tasks import TaskConfig
from adaecho.models.ghost_batch_norm import STATISTICS, check_ghost_size, use_ghost_batch_norm


@dataclass
class GhostOptions(TaskConfig):
    """The keys ``task.ghost_*``."""

    ghost_size: int | None = None  # examples per slice of virtual batch norm; null: the whole batch
    ghost_statistics: str = "average"  # average | sequential: running statistics over a step's slices

    def __post_init__(self) -> None:
        one_of("task.ghost_statistics", self.ghost_statistics, STATISTICS)

    def check_batches(self, config: Config) -> None:
        """Raises ConfigError where slices of ``ghost_size`` don't make up a batch or its micro-batches."""
        check_ghost_size(
            self.ghost_size,
            config.batch_size,
            config.adascale.num_gradients_to_accumulate,
            launched_ranks(),
        )

    def with_ghosts(self, model: nn.Module) -> nn.Module:
        """The model, its batch norm replaced where ``ghost_size`` is set."""
        if self.ghost_size is None:
            return model
        return use_ghost_batch_norm(model, self.ghost_size, self.ghost_statistics)  # type: ignore[arg-type]
