"""AdaScale around a torch optimizer."""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from adaecho.adascale import checks, saved_state
from adaecho.adascale.gradient_statistics import GainSettings, GradientStatistics, Sample
from adaecho.adascale.scale_invariant_steps import ScaleInvariantSteps
from adaecho.adascale.update import step_on_device, step_on_host, steps_on_device


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
    * ``measure``: lr as it is; gain, tau and ``gradient_noise_scale`` are readings. For any optimizer but
      LBFGS.

    Statistics are of the gradients as backward leaves them (after DistributedDataParallel's
    averaging), so clipping and unscaling before ``step()`` leave the gain alone. They are kept per parameter
    group: each group's learning rate is multiplied by its own gain; tau counts the pooled one.

    ``step()`` reads one small tensor back from the device. With ``SGD(fused=True)``, no dampening and the
    learning rate a tensor on the device it reads nothing: the gain, the decision to skip and tau stay there.

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
        if isinstance(optimizer, AdaScale):
            raise ValueError(
                "AdaScale: the optimizer is an AdaScale already, and its gain would count twice; wrap the SGD"
            )
        # Optimizer.__init__ is left out: groups, state and step hooks are the wrapped optimizer's own.
        checks.check_optimizer(optimizer, rule)
        self._optimizer = optimizer
        self._all_ranks = world_size is None
        numbers = checks.checked_numbers(world_size, scale, smoothing, num_gradients_to_accumulate)
        self._settings = GainSettings(*numbers, is_scaled_loss, debias_ewma, grad_scaler, rule)
        checks.check_parameters(self._parameters())
        self._progress = ScaleInvariantSteps()
        self._statistics = GradientStatistics(self._groups(), self._settings, self._progress.give_up)

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
        try:
            return getattr(self._optimizer, name)
        except AttributeError as error:
            wrapped = type(self._optimizer).__name__
            message = f"neither {type(self).__name__} nor the {wrapped} in it has an attribute {name!r}"
            if name in checks.OF_FAIRSCALE:
                message += f": {checks.OF_FAIRSCALE[name]}"
            raise AttributeError(message, name=name, obj=self) from error

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
        return float(self._statistics.gains()[-1 if pg_idx is None else pg_idx])

    def grad_var_avg(self, pg_idx: int | None = None) -> float:
        """Averaged sigma^2, the summed variance of one base-batch gradient's elements; waits."""
        variance = self._statistics.current_averages.variance
        return float(self._statistics.pooled(variance) if pg_idx is None else variance[pg_idx])

    def grad_sqr_avg(self, pg_idx: int | None = None) -> float:
        """Averaged mu^2, the squared norm of the expected gradient; waits."""
        square = self._statistics.current_averages.square
        return float(self._statistics.pooled(square) if pg_idx is None else square[pg_idx])

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
        """tau: how many steps of the base schedule the steps so far amount to; never waits.

        Where ``step()`` stays on a CUDA device, it is tau of one step earlier, always. Assign to it to go on
        with a count kept elsewhere.
        """
        return self._progress.reported

    @scale_invariant_steps.setter
    def scale_invariant_steps(self, tau: float) -> None:
        self._progress.set_tau(tau)

    @property
    def skipped_steps(self) -> int:
        """Steps not taken because a gradient was not finite; waits."""
        return self._progress.skipped_steps

    def schedule_increment(self) -> int:
        """Whole steps of the base schedule completed since the last call, for integer schedulers."""
        return self._progress.schedule_increment()

    def done(self, total_steps: float) -> bool:
        """Whether tau >= ``total_steps``, the base schedule's number of steps (Algorithm 2); waits."""
        return self._progress.tau >= total_steps

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
            RuntimeError: not ``num_gradients_to_accumulate`` backward passes since the last step, or
                ``torch.distributed`` has other ranks than when this was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sample = self._statistics.sample
        if sample is None:
            self._statistics.collector.refuse_between_passes("step()")
            checks.refuse_unseen_gradients(self._parameters())
            self._optimizer.step()
        else:
            if self._all_ranks:
                checks.check_ranks(self._settings.world_size)
            self._take_step(sample)
            self._statistics.begin(self._groups())
        return loss

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide ``.grad`` by the passes per step: before ``step()``, with ``is_scaled_loss=False`` only."""
        if self._settings.is_scaled_loss:
            raise RuntimeError("AdaScale: is_scaled_loss=True says that the losses were divided already")
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, float(self._settings.num_passes))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and forget the backward passes since the last step."""
        self._optimizer.zero_grad(set_to_none)
        self._statistics.begin(self._groups())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, between steps; its averages start with its first sample."""
        self._statistics.collector.refuse_between_passes("add_param_group()")
        self._optimizer.add_param_group(param_group)
        checks.check_parameters(self._parameters())
        self._statistics.begin(self._groups())

    def unhook(self) -> None:
        """Take the hooks off the parameters for good, so that nothing here keeps them alive."""
        self._statistics.collector.unhook()

    def __del__(self) -> None:
        if "_statistics" in self.__dict__:
            self.unhook()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, under "adascale", tensors and plain numbers of our own.

        ``torch.load(weights_only=True)`` reads it. It holds no settings: construct the optimizer as before.
        Within gradient accumulation it is refused (RuntimeError).
        """
        self._statistics.collector.refuse_between_passes("state_dict()")
        own = self._statistics.state_dict(self._parameters())
        return {
            **self._optimizer.state_dict(),
            saved_state.KEY: {**own, "progress": self._progress.state_dict()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint of AdaScale, of FairScale's, or of the bare optimizer (averages anew).

        Schedulers stay connected. A FairScale checkpoint holds numpy arrays, so ``torch.load`` needs
        ``weights_only=False`` for it, and no tau: assign ``scale_invariant_steps``.

        Raises:
            ValueError: the checkpoint is incomplete or damaged, or its groups or kind of averaging differ.
                Nothing has changed then.
        """
        self._statistics.collector.refuse_between_passes("load_state_dict()")
        optimizer_state, own = saved_state.split(state_dict)
        read = self._statistics.read(own, self._parameters())
        progress = ScaleInvariantSteps().state_dict() if own is None else own["progress"]
        ScaleInvariantSteps().load_state_dict(progress)  # refuses what can't be
        as_constructed = saved_state.as_constructed(optimizer_state, self.param_groups)
        self._optimizer.load_state_dict(as_constructed)  # the last that may
        self._statistics.restore(read)
        self._progress.load_state_dict(progress)
        self._statistics.begin(self._groups())

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("AdaScale: its hooks are on live parameters, so no copy or pickle; use state_dict()")

    def _groups(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.param_groups]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._groups() for parameter in group]

    def _take_step(self, sample: Sample) -> None:
        gain, factors = self._statistics.gains()[-1], self._statistics.rate_factors()
        on_device = self._step_supports_amp_scaling
        if on_device:
            amp = self.__dict__.get("found_inf"), self.__dict__.get("grad_scale")
            step_on_device(self._optimizer, factors.unbind(), sample.finite, *amp)
            taken = sample.finite
        else:
            gain, taken = step_on_host(self._optimizer, factors, gain, sample.finite)
        self._progress.advance(gain, taken)
        self._statistics.commit(sample, keep_gradient=on_device or bool(taken))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler asks: it hands a step that stays on the device its verdict, instead of reading it.
        return steps_on_device(self._optimizer, self._statistics.collector.device)


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
