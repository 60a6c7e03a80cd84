"""The AdaScale optimizer, which wraps a torch optimizer."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from adaecho.adascale.estimators import Averages
from adaecho.adascale.gradient_statistics import GradientStatistics, Settings

_EXPONENTS = {"gain": 1.0, "sqrt_gain": 0.5, "measure": 0.0}  # learning rate = lr * gain**exponent
RULES = tuple(_EXPONENTS)
# AdaScale's numbers are stored in the parameter groups of a state dict. Each key is this prefix, followed by
# a field of Averages or by one of these names.
_PREFIX = "adascale_"
_PROGRESS = ("scale_invariant_steps", "schedule_steps", "skipped_steps")


class AdaScale(Optimizer):
    """AdaScale SGD (Johnson et al., ICML 2020, arXiv 2007.05105) around ``torch.optim.SGD``.

    AdaScale lets you increase the batch size by a factor of S without retuning the learning rate. The
    original batch is called the base batch, and its learning-rate schedule the base schedule. A step of
    AdaScale averages the gradients of S base batches, and replaces r steps of the base schedule, with r in
    [1, S]. AdaScale estimates r, called the gain, and multiplies the learning rate by it. The sum of all
    gains so far is called tau (``scale_invariant_steps``). Evaluate the base schedule at step floor(tau)::

        optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=4)
        while not optimizer.done(total_steps):              # steps of the base schedule
            for group in optimizer.param_groups:
                group["lr"] = schedule(math.floor(optimizer.scale_invariant_steps))
            optimizer.zero_grad()
            for micro_batch in micro_batches:               # 4 backward passes
                (loss(micro_batch) / 4).backward()
            optimizer.step()                                # uses lr * gain, then restores lr

    ``rule`` selects how the gain changes the learning rate:

    * ``gain``: use lr * r. This is the rule of the paper, for SGD with or without momentum.
    * ``sqrt_gain``: use lr * sqrt(r), for Adam and AdamW. This is a heuristic without AdaScale's convergence
      guarantee. AdaptDL (Qiao et al., OSDI 2021) uses the same exponent, but first divides gradients by
      Adam's sqrt(v) + epsilon. Malladi et al. (NeurIPS 2022) derive the exponent for the case where noise
      dominates, and also scale betas and epsilon.
    * ``measure``: leave lr unchanged, and only measure the gain, tau and ``gradient_noise_scale``. This works
      with any optimizer.

    Each parameter group has its own gain. tau is the sum of the pooled gains, which are computed from all
    trained groups together. The gain is measured when the last backward pass of a step ends, after
    DistributedDataParallel has averaged the gradients. Clipping or unscaling them before ``step()`` does not
    change it.

    ``step()`` waits for the device. AdaScale keeps up to 64 MiB of gradients in memory longer than autograd
    would. Activation checkpoints need ``use_reentrant=False``.

    Args:
        optimizer: the optimizer to wrap, for example SGD or torch's ``ZeroRedundancyOptimizer``.
        world_size: number of ranks whose gradients are averaged. Default: the world size of
            ``torch.distributed`` if it is initialized, else 1. Give 1 if each rank trains a separate model.
        scale: S >= 1, the number of base batches that a step averages; it may be a fraction. Default: one
            base batch per micro-batch, that is ``world_size * num_gradients_to_accumulate``.
        smoothing: theta of the moving averages, in [0, 1). Default: ``max(1 - n / 1000, 0)``, where n is the
            number of micro-batches of a step over all ranks. An average then spans about 1000 / n steps.
        num_gradients_to_accumulate: number of backward passes of each rank per step, at least 1. The sum over
            all ranks must be at least 2, because a variance needs two gradients.
        is_scaled_loss: whether you divide each loss by ``num_gradients_to_accumulate``, so that ``.grad`` is
            a mean. If not, call ``scale_grad_by_num_grads_to_accum()`` before ``step()``.
        debias_ewma: if true, use exponential averages divided by the sum of their weights. If false, use the
            paper's form: the mean of the first 1 / (1 - theta) samples, then an exponential average (appendix
            B.3).
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that statistics can be reported in unscaled
            units.
        rule: ``gain``, ``sqrt_gain`` or ``measure``.

    Raises:
        ValueError: an argument is out of range, the rule does not fit the optimizer, or parameters are
            sharded (FSDP, FSDP2, DTensor).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
        grad_scaler: torch.amp.GradScaler | None = None,
        rule: str = "gain",
    ) -> None:
        # Optimizer.__init__ is not called, because groups, state and step hooks belong to the wrapped
        # optimizer.
        _check_optimizer(optimizer, rule)
        self._optimizer, self._exponent = optimizer, _EXPONENTS[rule]
        self._all_ranks = world_size is None
        ranks = _num_ranks() if world_size is None else world_size
        num_gradients = ranks * num_gradients_to_accumulate
        if num_gradients_to_accumulate < 1 or num_gradients < 2:
            raise ValueError(
                f"AdaScale: num_gradients_to_accumulate={num_gradients_to_accumulate} on {ranks} rank(s): "
                "the variance needs at least 2 gradients per step; split each batch into 2 or more "
                "micro-batches and set num_gradients_to_accumulate to their number"
            )
        scale = float(num_gradients if scale is None else scale)
        smoothing = max(1 - num_gradients / 1000, 0.0) if smoothing is None else smoothing  # appendix B.3
        if not (scale >= 1 and 0 <= smoothing < 1):
            raise ValueError(
                f"AdaScale: scale={scale}, smoothing={smoothing}: expected scale >= 1 and smoothing in [0, 1)"
            )
        self._settings = Settings(
            ranks, num_gradients_to_accumulate, scale, smoothing, is_scaled_loss, debias_ewma, grad_scaler
        )
        self._statistics = GradientStatistics(self._groups(), self._settings)
        self._tau, self._schedule_steps = 0.0, 0

    # These are properties because load_state_dict() of the wrapped optimizer replaces its groups and state.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the wrapped optimizer. Their ``lr`` is the base learning rate, without gain."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self._optimizer.state

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # __init__ has not set it yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    # GradScaler leaves unscaling and skipping to an optimizer that has this flag, as a fused optimizer does.
    # It must not leave them to the wrapped optimizer, so AdaScale does not pass its flag on.
    _step_supports_amp_scaling = False

    # Gain and progress

    @property
    def scale(self) -> float:
        """S, the number of base batches that one step averages."""
        return self._settings.scale

    @property
    def smoothing(self) -> float:
        """theta, the smoothing factor of the moving averages, in [0, 1)."""
        return self._settings.smoothing

    def gain(self, pg_idx: int | None = None) -> float:
        """Return the gain, in [1, S], of one parameter group, or by default of all trained groups together.

        A gain of 3 means that one step, which averages S base batches, replaces three steps of the base
        schedule. The gain is updated after the last backward pass of each step; before the first one, it is
        1. On a GPU, this call waits until the gradients are computed.

        Args:
            pg_idx: index of the parameter group; None for all trained groups together.
        """
        return self._statistics.gains()[-1 if pg_idx is None else pg_idx]

    def grad_var_avg(self, pg_idx: int | None = None) -> float:
        """Return the moving average of sigma^2, the trace of the covariance of a base-batch gradient."""
        return self._average(pg_idx).variance

    def grad_sqr_avg(self, pg_idx: int | None = None) -> float:
        """Return the moving average of mu^2, the squared norm of the expected gradient."""
        return self._average(pg_idx).square

    def _average(self, pg_idx: int | None) -> Averages:
        return self._statistics.pooled() if pg_idx is None else self._statistics.pending.averages[pg_idx]

    def gradient_noise_scale(self, pg_idx: int | None = None) -> float:
        """Return the gradient noise scale sigma^2 / mu^2, in units of base batches, at least 0.

        sigma^2 is the trace of the covariance of a base batch's gradient, and mu^2 is the squared norm of the
        expected gradient. To get the simple noise scale of McCandlish et al. (2018, arXiv 1812.06162,
        equation 2.9), multiply the result by the number of examples in a base batch. As in appendix A.1 of
        that paper, both numbers are averaged over steps before the division.

        The result is nan before the first step, and inf if mu^2 is 0. If noise dominates, the result is too
        low, because negative estimates of mu^2 count as 0.
        """
        variance, square = self.grad_var_avg(pg_idx), self.grad_sqr_avg(pg_idx)
        if square == 0:
            return math.inf if variance else math.nan
        return variance / square

    @property
    def scale_invariant_steps(self) -> float:
        """tau: how many steps of the base schedule the steps so far replace. You can assign this property."""
        return self._tau

    @scale_invariant_steps.setter
    def scale_invariant_steps(self, tau: float) -> None:
        self._tau, self._schedule_steps = tau, math.floor(tau)

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because a gradient was not finite."""
        return self._statistics.skipped_steps

    def schedule_increment(self) -> int:
        """Return the number of base-schedule steps completed since the last call, to advance a scheduler."""
        before, self._schedule_steps = self._schedule_steps, math.floor(self._tau)
        return self._schedule_steps - before

    def done(self, total_steps: float) -> bool:
        """Return whether training is complete, that is whether tau >= ``total_steps`` (Algorithm 2).

        tau is ``scale_invariant_steps``, the number of steps of the base schedule that are done. Johnson et
        al. (arXiv 2007.05105) describe the algorithm.

        Args:
            total_steps: length of the base schedule, in steps.
        """
        return self._tau >= total_steps

    # Methods of an optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with each group's learning rate multiplied by its gain, then restore the rates.

        With ``rule="sqrt_gain"``, learning rates are multiplied by the square root of the gain. With
        ``rule="measure"``, they do not change.

        If a gradient is not finite, all ranks skip the step. The gain and ``scale_invariant_steps`` then do
        not change.

        Args:
            closure: function that runs the backward passes of the step and returns the loss.

        Raises:
            RuntimeError: only some of the ``num_gradients_to_accumulate`` backward passes have run, the
                gradients do not come from ``backward()``, or the number of ranks has changed since AdaScale
                was created.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        statistics = self._statistics
        if not statistics.complete:
            statistics.refuse_between_passes("step()")
            self._step_without_backward()
        elif self._all_ranks and _num_ranks() != self._settings.num_ranks:
            raise RuntimeError(
                f"AdaScale: created with {self._settings.num_ranks} rank(s), but torch.distributed now has "
                f"{_num_ranks()}; create it after init_process_group, Accelerator() or fabric.launch(), or "
                "pass world_size=1 if each rank trains a separate model"
            )
        elif statistics.pending.finite:
            *gains, pooled = statistics.gains()
            with self._learning_rates_times([gain**self._exponent for gain in gains]):
                self._optimizer.step()
            self._tau += pooled
            statistics.commit()
        statistics.begin_step(self._groups())
        return loss

    def _step_without_backward(self) -> None:
        if all(parameter.grad is None for parameter in self._parameters()):
            return
        # A step with learning rate 0 is allowed, because torch.distributed.checkpoint.state_dict creates an
        # optimizer's state by taking a step with zero gradients and zero learning rates.
        if any(group["lr"] != 0 for group in self.param_groups):
            raise RuntimeError(
                "AdaScale: step() with gradients that did not come from backward() (set by hand, or after "
                "unhook()), so the gain is unknown; step the wrapped optimizer instead"
            )
        self._optimizer.step()

    @contextmanager
    def _learning_rates_times(self, factors: list[float]) -> Iterator[None]:
        # Restore the original objects, because a schedule may hold a reference to a learning rate tensor.
        base = [group["lr"] for group in self.param_groups]
        try:
            for group, lr, factor in zip(self.param_groups, base, factors, strict=True):
                group["lr"] = lr * factor
            yield
        finally:
            for group, lr in zip(self.param_groups, base, strict=True):
                group["lr"] = lr

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide ``.grad`` by the number of backward passes per step.

        Call this once before each ``step()`` if you created AdaScale with ``is_scaled_loss=False``. ``.grad``
        is then a sum over ``num_gradients_to_accumulate`` backward passes, and this call makes it a mean.

        Raises:
            RuntimeError: AdaScale was created with ``is_scaled_loss=True``, so you already divide each loss.
        """
        if self._settings.is_scaled_loss:
            raise RuntimeError("AdaScale: the losses are already divided (is_scaled_loss=True)")
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad /= self._settings.num_passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and discard the backward passes since the last step."""
        self._optimizer.zero_grad(set_to_none)
        self._statistics.begin_step(self._groups())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group between two steps. Its averages start with its first sample."""
        self._statistics.refuse_between_passes("add_param_group()")
        self._optimizer.add_param_group(param_group)
        self._statistics.begin_step(self._groups())

    def unhook(self) -> None:
        """Remove the hooks from the parameters for good, so that later backward passes are not observed."""
        self._statistics.unhook()

    def __del__(self) -> None:
        if "_statistics" in self.__dict__:
            self.unhook()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with AdaScale's averages and progress added.

        The added numbers are in the parameter groups, under keys that begin with ``adascale_``. You can save
        the state with ``torch.save`` or ``torch.distributed.checkpoint``.

        To resume, create AdaScale with the same arguments as before. ``scale`` and
        ``num_gradients_to_accumulate`` may differ if the base batch has the same size.

        Raises:
            RuntimeError: only some of the current step's backward passes have run.
        """
        self._statistics.refuse_between_passes("state_dict()")
        state = self._optimizer.state_dict()
        progress = dict(zip(_PROGRESS, (self._tau, self._schedule_steps, self.skipped_steps), strict=True))
        numbers = [averages._asdict() | progress for averages in self._statistics.averages]
        groups = [
            group | {_PREFIX + key: number for key, number in own.items()}
            for group, own in zip(state["param_groups"], numbers, strict=True)
        ]
        return {**state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state of AdaScale, or from a state of the wrapped optimizer alone.

        In the second case, the averages start from zero.

        Raises:
            ValueError: the parameter groups differ. The state is then unchanged.
        """
        self._statistics.refuse_between_passes("load_state_dict()")
        self._optimizer.load_state_dict(state_dict)
        numbers = [
            {key: group.pop(_PREFIX + key, 0) for key in (*Averages._fields, *_PROGRESS)}
            for group in self.param_groups
        ]
        self._statistics.unhook()
        self._statistics = GradientStatistics(self._groups(), self._settings)
        self._statistics.averages = [Averages(*(one[key] for key in Averages._fields)) for one in numbers]
        self._tau, self._schedule_steps, self._statistics.skipped_steps = (
            numbers[0][key] for key in _PROGRESS
        )

    def _groups(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.param_groups]

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(self._groups()))


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _check_optimizer(optimizer: Optimizer, rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"AdaScale: rule={rule!r}: must be one of {', '.join(RULES)}")
    # FSDP marks the parameters that it flattens or shards. FSDP2 and tensor parallelism use DTensor.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(hasattr(one, "_local_tensor") or getattr(one, "_fsdp_flattened", False) for one in parameters):
        raise ValueError(
            "AdaScale: a parameter is sharded (FSDP, FSDP2 or DTensor), so no rank has the whole gradient of "
            "a micro-batch; use DistributedDataParallel, and ZeroRedundancyOptimizer to shard the "
            "optimizer's state"
        )
    made_for: Any = {"gain": SGD, "sqrt_gain": (Adam, AdamW)}
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer wraps another optimizer
    is_torch = type(inner).__module__.startswith("torch.optim.")
    if rule != "measure" and is_torch and not isinstance(inner, made_for[rule]):
        raise ValueError(
            f'AdaScale: rule="{rule}" does not support {type(inner).__name__}; use "gain" for SGD, '
            '"sqrt_gain" for Adam and AdamW, or "measure", which leaves the learning rate unchanged'
        )
