"""AdaScale around a torch optimizer."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from adaecho.adascale.estimators import Averages
from adaecho.adascale.gradient_statistics import GradientStatistics, Settings

_EXPONENTS = {"gain": 1.0, "sqrt_gain": 0.5, "measure": 0.0}  # of the gain in the rate
RULES = tuple(_EXPONENTS)


class AdaScale(Optimizer):
    """AdaScale SGD (Johnson et al., ICML 2020, arXiv 2007.05105) around ``torch.optim.SGD``.

    A step that averages S base batches multiplies the learning rate by the gain r in [1, S] instead of S, and
    counts as r steps of the base schedule. A schedule tuned for the base batch is used as it is, read at
    floor(tau), tau being the sum of the gains so far (``scale_invariant_steps``)::

        optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=4)
        while not optimizer.done(total_steps):              # T of the base schedule
            for group in optimizer.param_groups:
                group["lr"] = schedule(math.floor(optimizer.scale_invariant_steps))
            optimizer.zero_grad()
            for micro_batch in micro_batches:               # 4 backward passes
                (loss(micro_batch) / 4).backward()
            optimizer.step()                                # lr * gain, for this step only

    ``rule`` says what the gain does to the rate:

    * ``gain``: lr * r, for SGD with and without momentum, which the theory covers.
    * ``sqrt_gain``: lr * sqrt(r), for Adam and AdamW. The exponent is AdaptDL's (``AdamScale``, Qiao et al.,
      OSDI 2021), and agrees with the square root rule for batch sizes where noise dominates (Malladi et al.,
      NeurIPS 2022, which also scales betas and epsilon; here they stay). AdaptDL measures the gain on
      gradients divided by Adam's sqrt(v) + epsilon; here it is of the gradients as they are. A heuristic,
      without AdaScale's guarantee.
    * ``measure``: lr as it is; gain, tau and ``gradient_noise_scale`` are readings, of any optimizer.

    Statistics are of the gradients as backward leaves them (after DistributedDataParallel's
    averaging), so clipping and unscaling before ``step()`` leave the gain alone. They are kept per parameter
    group: each group's learning rate is multiplied by its own gain; tau counts the pooled one.

    ``step()`` reads one small tensor back from the device. Within a backward pass up to 64 MiB of gradients
    are kept longer than autograd would. Activation checkpoints need ``use_reentrant=False``.

    Args:
        optimizer: the optimizer to drive; torch's ``ZeroRedundancyOptimizer`` too.
        world_size: ranks whose gradients are averaged; default ``torch.distributed``'s, else 1. 1 where there
            are several: each trains a model of its own.
        scale: S, how many base batches a step averages over, >= 1, not necessarily whole; default one per
            micro-batch, ``world_size * num_gradients_to_accumulate``. Needed where that is 1: the variance is
            then taken from the difference between the gradients of consecutive steps, on fresh batches only
            (``mark_repeated_batch``).
        smoothing: theta of the moving averages, in [0, 1); default ``max(1 - n / 1000, 0)`` with n the
            micro-batches of a step over all ranks (S where n is 1). An average spans about 1000 / n steps.
        num_gradients_to_accumulate: backward passes per step and rank, >= 1.
        is_scaled_loss: whether each pass's loss is divided by that number, so that ``.grad`` adds up to a
            mean. If not, call ``scale_grad_by_num_grads_to_accum()`` before ``step()``.
        debias_ewma: exponential averages divided by the sum of their weights; False: the paper's plain mean
            of the first 1 / (1 - theta) samples, then exponential (appendix B.3).
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that statistics are taken in unscaled units.
        rule: ``gain``, ``sqrt_gain`` or ``measure``, see above.

    Raises:
        ValueError: an argument can't be, the rule is not for that optimizer, or parameters are sharded (FSDP,
            FSDP2, DTensor).
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
        # Optimizer.__init__ is left out: groups, state and step hooks are the wrapped optimizer's own.
        _check_optimizer(optimizer, rule)
        self._optimizer, self._exponent = optimizer, _EXPONENTS[rule]
        self._all_ranks = world_size is None
        ranks = _num_ranks() if world_size is None else world_size
        num_gradients = ranks * num_gradients_to_accumulate
        if num_gradients_to_accumulate < 1:
            raise ValueError(
                f"AdaScale: num_gradients_to_accumulate={num_gradients_to_accumulate}: must be >= 1"
            )
        if scale is None and num_gradients == 1:
            raise ValueError(
                "AdaScale: one process without gradient accumulation has one gradient a step. Give "
                "num_gradients_to_accumulate >= 2, or scale= (how many base batches the gradient averages "
                "over; the variance is then taken across steps)"
            )
        scale = float(num_gradients if scale is None else scale)
        if smoothing is None:
            # Appendix B.3, with one gradient for each base batch: an average spans 1000 base batches.
            smoothing = max(1 - (num_gradients if num_gradients > 1 else scale) / 1000, 0.0)
        if not (scale >= 1 and 0 <= smoothing < 1):
            raise ValueError(
                f"AdaScale: scale={scale}, smoothing={smoothing}: must be >= 1, and at least 0 and below 1"
            )
        self._settings = Settings(
            ranks, num_gradients_to_accumulate, scale, smoothing, is_scaled_loss, debias_ewma, grad_scaler
        )
        self._statistics = GradientStatistics(self._groups(), self._settings)
        self._tau, self._schedule_steps = 0.0, 0

    # Looked up each time: load_state_dict makes new group dicts, and schedulers must find those.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups; ``lr`` is the base learning rate."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self._optimizer.state

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not constructed yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    # GradScaler asks a fused optimizer to skip by itself; here the step is skipped before.
    _step_supports_amp_scaling = False

    # Gain and progress

    @property
    def scale(self) -> float:
        """S: how many base batches one step averages over."""
        return self._settings.scale

    @property
    def smoothing(self) -> float:
        """theta of the moving averages."""
        return self._settings.smoothing

    def gain(self, pg_idx: int | None = None) -> float:
        """The gain in [1, S] of one parameter group, or pooled over those trained; waits for the device.

        Between the last backward pass and ``step()`` it includes the coming step. 1 before the first one.
        """
        return self._statistics.gains()[-1 if pg_idx is None else pg_idx]

    def grad_var_avg(self, pg_idx: int | None = None) -> float:
        """Averaged sigma^2, the summed variance of one base-batch gradient's elements; waits."""
        return self._average(pg_idx).variance

    def grad_sqr_avg(self, pg_idx: int | None = None) -> float:
        """Averaged mu^2, the squared norm of the expected gradient; waits."""
        return self._average(pg_idx).square

    def _average(self, pg_idx: int | None) -> Averages:
        return self._statistics.pooled() if pg_idx is None else self._statistics.coming.averages[pg_idx]

    def gradient_noise_scale(self, pg_idx: int | None = None) -> float:
        """sigma^2 / mu^2 in base batches, >= 0; waits for the device.

        Times the examples of a base batch it is the simple noise scale tr(Sigma) / |G|^2 (McCandlish et al.
        2018, arXiv 1812.06162, equation 2.9), the batch size about which larger batches stop to pay. Both
        averages are taken before the ratio (appendix A.1 there). inf where mu^2 is 0, nan before the first
        sample. Like the gain it comes out low where noise dominates, since mu^2 is clipped at 0 before it is
        averaged.
        """
        variance, square = self.grad_var_avg(pg_idx), self.grad_sqr_avg(pg_idx)
        if square == 0:
            return math.inf if variance else math.nan
        return variance / square

    @property
    def scale_invariant_steps(self) -> float:
        """tau: how many steps of the base schedule the steps so far amount to.

        Assign to it to go on with a count kept elsewhere.
        """
        return self._tau

    @scale_invariant_steps.setter
    def scale_invariant_steps(self, tau: float) -> None:
        self._tau, self._schedule_steps = tau, math.floor(tau)

    @property
    def skipped_steps(self) -> int:
        """Steps not taken because a gradient was not finite."""
        return self._statistics.skipped_steps

    def schedule_increment(self) -> int:
        """Whole steps of the base schedule completed since the last call, for integer schedulers."""
        before, self._schedule_steps = self._schedule_steps, math.floor(self._tau)
        return self._schedule_steps - before

    def done(self, total_steps: float) -> bool:
        """Whether tau >= ``total_steps``, the base schedule's number of steps (Algorithm 2)."""
        return self._tau >= total_steps

    def mark_repeated_batch(self) -> None:
        """Say, before backward, that the coming step repeats an earlier batch (batch echoing).

        Only the estimate across steps needs to know: it takes no sample there, since the noise of two passes
        over one batch is the same noise. The mark is used up by the step whose backward comes next, even if
        that step is then skipped.
        """
        self._statistics.mark_repeated_batch()

    # The optimizer's methods

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with each group's learning rate multiplied as ``rule`` says, then restored.

        Not taken, on any rank, if a gradient was not finite; averages and tau then stay as they were.

        Raises:
            RuntimeError: there are gradients of fewer than ``num_gradients_to_accumulate`` backward passes,
                or ``torch.distributed`` has other ranks than when this was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        statistics = self._statistics
        if not statistics.complete:
            statistics.refuse_between_passes("step()")
            if any(parameter.grad is not None for parameter in self._parameters()):
                raise RuntimeError(
                    "AdaScale: step() with gradients that no backward pass brought (set by hand, or after "
                    "unhook()), so their gain is unknown; step the wrapped optimizer instead"
                )
        elif self._all_ranks and _num_ranks() != self._settings.num_ranks:
            raise RuntimeError(
                f"AdaScale: made where torch.distributed had {self._settings.num_ranks} rank(s), and now "
                f"there are {_num_ranks()}; make it after init_process_group, Accelerator() or "
                "fabric.launch(), or give world_size=1 where each rank trains a model of its own"
            )
        elif statistics.coming.finite:
            *gains, pooled = statistics.gains()
            with self._learning_rates_times([gain**self._exponent for gain in gains]):
                self._optimizer.step()
            self._tau += pooled
            statistics.commit()
        statistics.begin(self._groups())
        return loss

    @contextmanager
    def _learning_rates_times(self, factors: list[float]) -> Iterator[None]:
        # The very same objects are put back: a schedule may hold a rate that is a tensor and write into it.
        base = [group["lr"] for group in self.param_groups]
        try:
            for group, lr, factor in zip(self.param_groups, base, factors, strict=True):
                group["lr"] = lr * factor
            yield
        finally:
            for group, lr in zip(self.param_groups, base, strict=True):
                group["lr"] = lr

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide ``.grad`` by the passes per step: before ``step()``, with ``is_scaled_loss=False`` only."""
        if self._settings.is_scaled_loss:
            raise RuntimeError("AdaScale: is_scaled_loss=True says that the losses were divided already")
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad /= self._settings.num_passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and forget the backward passes since the last step."""
        self._optimizer.zero_grad(set_to_none)
        self._statistics.begin(self._groups())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, between steps; its averages start with its first sample."""
        self._statistics.refuse_between_passes("add_param_group()")
        self._optimizer.add_param_group(param_group)
        self._statistics.begin(self._groups())

    def unhook(self) -> None:
        """Take the hooks off the parameters for good, so that nothing here keeps them alive."""
        self._statistics.unhook()

    def __del__(self) -> None:
        if "_statistics" in self.__dict__:
            self.unhook()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, under "adascale", tensors and plain numbers of our own.

        ``torch.load(weights_only=True)`` reads it. It holds no settings: construct the optimizer as before,
        but for ``scale`` and ``num_gradients_to_accumulate``, which may be others over the same base batch.
        Within gradient accumulation it is refused (RuntimeError).
        """
        self._statistics.refuse_between_passes("state_dict()")
        own = self._statistics.state_dict(self._parameters())
        progress = {"scale_invariant_steps": self._tau, "schedule_steps": self._schedule_steps}
        return {**self._optimizer.state_dict(), "adascale": own | progress}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint of AdaScale, or of the bare optimizer (averages anew); schedulers too.

        Raises:
            ValueError: the optimizer's groups are others. Nothing has changed then.
        """
        self._statistics.refuse_between_passes("load_state_dict()")
        own = state_dict.get("adascale")
        self._optimizer.load_state_dict({key: of for key, of in state_dict.items() if key != "adascale"})
        self._statistics.unhook()
        self._statistics = GradientStatistics(self._groups(), self._settings)
        self._tau, self._schedule_steps = 0.0, 0
        if own is not None:
            self._statistics.load_state_dict(own, self._parameters())
            self._tau, self._schedule_steps = own["scale_invariant_steps"], own["schedule_steps"]

    def _groups(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.param_groups]

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(self._groups()))


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _check_optimizer(optimizer: Optimizer, rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"AdaScale: rule={rule!r}: must be one of {', '.join(RULES)}")
    # FSDP marks its flat parameters and those it shards; FSDP2 and tensor parallelism use DTensor.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(hasattr(one, "_local_tensor") or getattr(one, "_fsdp_flattened", False) for one in parameters):
        raise ValueError(
            "AdaScale: a parameter is sharded (FSDP, FSDP2 or DTensor), so no rank sees the gradient of one "
            "micro-batch whose norm the gain needs. Use DistributedDataParallel, with "
            "torch.distributed.optim.ZeroRedundancyOptimizer to shard the optimizer's state"
        )
    made_for: Any = {"gain": SGD, "sqrt_gain": (Adam, AdamW)}
    stepping = getattr(optimizer, "optim", optimizer)  # that of a ZeroRedundancyOptimizer
    of_torch = type(stepping).__module__.startswith("torch.optim.")
    if rule != "measure" and of_torch and not isinstance(stepping, made_for[rule]):
        raise ValueError(
            f'AdaScale: rule="{rule}" is not made for {type(stepping).__name__}: "gain" is for SGD, '
            '"sqrt_gain" for Adam and AdamW; "measure" reads the gain and leaves the rate alone'
        )


class AdaScaleWrapper(AdaScale):
    """``AdaScale(optim_cls(params, **additional_optim_args))``, for code that builds optimizers from classes.

    Not to be handed to an optimizer that shards parameters over ranks, where each rank would have the gain of
    its own parameters: write ``AdaScale(ZeroRedundancyOptimizer(params, torch.optim.SGD, ...))``.

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
        of_ours = world_size, scale, smoothing, num_gradients_to_accumulate, is_scaled_loss, debias_ewma
        super().__init__(optim_cls(params, **additional_optim_args), *of_ours, grad_scaler, rule)
