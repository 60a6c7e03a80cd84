"""Ghost (or "virtual") batch norm: batch norm over slices of a batch with a fixed number of examples.

Source: E. Hoffer, I. Hubara, D. Soudry, "Train longer, generalize better", 2017, algorithm 1.
"""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from adaecho.errors import ConfigError

Statistics = Literal["average", "sequential"]


class GhostBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose statistics are computed over slices of ``ghost_size`` successive examples.

    It equals ``nn.BatchNorm2d`` on each slice in training, and on the whole batch in evaluation. With
    n = ``momentum``, a training step updates the running statistics r from the statistics s_0, ..., s_{k-1}
    of its k slices:

    * "average": r <- (1 - n) r + n mean(s_i), as in the init2winit code base.
    * "sequential": r <- (1 - n)^k r + sum_i n (1 - n)^(k-1-i) s_i, as in Hoffer et al., algorithm 1.

    Args:
        ghost_size: number of examples in a slice, at least 1.
        statistics: how to update the running statistics, "average" or "sequential".
        momentum: weight n of a new value in the running statistics, in [0, 1].

    Raises:
        ValueError: in training, ``ghost_size`` does not divide the batch.
    """

    def __init__(
        self,
        num_features: int,
        ghost_size: int,
        *,
        statistics: Statistics = "average",
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.ghost_size, self.statistics = ghost_size, statistics

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize float [N, C, H, W]; the result has the same shape and memory layout."""
        if not self.training:
            return super().forward(x)
        if not len(x) or len(x) % self.ghost_size:
            raise ValueError(
                f"ghost batch norm: the ghost size {self.ghost_size} does not divide a batch of {len(x)} "
                "examples; use a batch size that is a multiple"
            )
        # On an H200, this loop takes 1.4 to 2.2 times as long as plain batch norm, in both memory layouts. A
        # single call over all slices took up to 5.2 times as long (benchmarks/gpu/ghost_batch_norm.json).
        parts = x.chunk(len(x) // self.ghost_size)
        means, variances = (
            [x.new_zeros(self.num_features, dtype=torch.float32) for _ in parts] for _ in range(2)
        )
        normalized = [
            functional.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
            for part, mean, variance in zip(parts, means, variances, strict=True)
        ]
        self._update(torch.stack(means), torch.stack(variances))
        return torch.cat(normalized)

    @torch.no_grad()
    def _update(self, means: torch.Tensor, variances: torch.Tensor) -> None:
        """Update the running statistics from the statistics of the slices, [k, C]."""
        assert self.momentum is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        slices = len(means)
        if self.statistics == "average":
            kept, share = 1 - self.momentum, means.new_full((slices,), self.momentum / slices)
        else:
            updates_after = torch.arange(slices - 1, -1, -1, dtype=means.dtype, device=means.device)
            kept, share = (1 - self.momentum) ** slices, self.momentum * (1 - self.momentum) ** updates_after
        self.running_mean.mul_(kept).add_(share @ means)
        self.running_var.mul_(kept).add_(share @ variances)
        self.num_batches_tracked.add_(1)

    def extra_repr(self) -> str:
        """Return the main arguments, which ``print(model)`` shows."""
        return f"{self.num_features}, ghost_size={self.ghost_size}, statistics={self.statistics}"


def use_ghost_batch_norm(model: nn.Module, ghost_size: int, statistics: Statistics = "average") -> nn.Module:
    """Replace each ``nn.BatchNorm2d`` in a model by ``GhostBatchNorm2d``, with its weights and statistics.

    Raises:
        ConfigError: the model has no batch norm, or batch norm of another type.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            if type(module) is not nn.BatchNorm2d or module.momentum is None or not module.affine:
                raise ConfigError(
                    f"task.ghost_size={ghost_size}: needs plain nn.BatchNorm2d, but {name} of the model is a "
                    f"{type(module).__name__}; choose another model, or task.ghost_size=null"
                )
            ghost = GhostBatchNorm2d(
                module.num_features,
                ghost_size,
                statistics=statistics,
                eps=module.eps,
                momentum=module.momentum,
            )
            ghost.load_state_dict(module.state_dict())
            setattr(parent, name, ghost)
            replaced += 1
    if not replaced:
        raise ConfigError(f"task.ghost_size={ghost_size}: the model has no batch norm; set it to null")
    return model
