"""AdaScale with an optimizer's constructor."""

import sys
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from adaecho.adascale.optimizer import AdaScale


class AdaScaleWrapper(AdaScale):
    """``AdaScale(optim_cls(params, **additional_optim_args))``, for code that builds optimizers from classes.

    Not to be handed to an optimizer that shards parameters over ranks, where each rank would have the gain of
    its own parameters: ``ZeroRedundancyOptimizer(params, AdaScaleWrapper)`` is refused. Wrap that one.

    Args:
        params: parameters or groups, for ``optim_cls``.
        world_size: this and the following as in ``AdaScale``.
        scale: S.
        smoothing: theta.
        num_gradients_to_accumulate: backward passes per step.
        debias_ewma: kind of averaging.
        optim_cls: the optimizer's class.
        is_scaled_loss: whether losses are divided by ``num_gradients_to_accumulate``.
        grad_scaler: the GradScaler in use.
        rule: what the gain does to the rate.
        **additional_optim_args: the optimizer's own arguments.

    Raises:
        ValueError: as of ``AdaScale``, or constructed by a ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        params: ParamsT,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: type[Optimizer] = SGD,
        *,
        is_scaled_loss: bool = True,
        grad_scaler: torch.amp.GradScaler | None = None,
        rule: str = "gain",
        **additional_optim_args: Any,
    ) -> None:
        # Nothing but who calls tells that these are one rank's share of the parameters.
        if type(sys._getframe(1).f_locals.get("self")).__name__ == "ZeroRedundancyOptimizer":
            raise ValueError(
                "AdaScaleWrapper: inside a ZeroRedundancyOptimizer each rank has the gain of its own share "
                "of the parameters; write AdaScale(ZeroRedundancyOptimizer(params, torch.optim.SGD, ...))"
            )
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size=world_size,
            scale=scale,
            smoothing=smoothing,
            num_gradients_to_accumulate=num_gradients_to_accumulate,
            is_scaled_loss=is_scaled_loss,
            debias_ewma=debias_ewma,
            grad_scaler=grad_scaler,
            rule=rule,
        )
