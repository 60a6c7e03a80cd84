"""Measure AdaScale's gradient statistics with hooks that observe each backward pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adaecho.adascale.estimators import Averages, estimate, gain_ratio, norms_by_group, total_squares

# Norms are computed as soon as the held gradients exceed this number of bytes.
_MAX_HELD_BYTES = 64 << 20


@dataclass(frozen=True)
class Settings:
    """The arguments of AdaScale, after defaults have been filled in."""

    num_ranks: int
    num_passes: int  # num_gradients_to_accumulate
    scale: float
    smoothing: float
    is_scaled_loss: bool
    debias_ewma: bool
    grad_scaler: torch.amp.GradScaler | None

    @property
    def num_gradients(self) -> int:
        """Number of micro-batches in one step, over all ranks."""
        return self.num_ranks * self.num_passes


class Pending(NamedTuple):
    """The gradient statistics after the backward passes of a step, before the optimizer takes it."""

    averages: list[Averages]  # one element per parameter group
    finite: bool  # whether all gradients of the step are finite; if not, the averages exclude the step


class GradientStatistics:
    """Measures each parameter group's gradient variance and squared mean during the backward passes."""

    def __init__(self, groups: Sequence[Sequence[Tensor]], settings: Settings) -> None:
        self.settings = settings
        self.averages: list[Averages] = []  # for each parameter group; only commit() changes them
        self.skipped_steps = 0
        # The key is the id, because a tensor's hash is a Python function that takes as long as the hook.
        self._hooked: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._is_closed = False
        self._readings: Tensor | None = None  # [2, num_groups], after the last pass of a step
        self._pending: Pending | None = None
        self.begin_step(groups)

    def begin_step(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Discard the results of earlier backward passes, and hook parameters that were added or unfrozen."""
        self.skipped_steps += not self.pending.finite
        for parameter in chain.from_iterable(groups):
            key = id(parameter)
            if parameter.requires_grad and key not in self._hooked and not self._is_closed:
                self._hooked[key] = parameter
                observe = partial(self._observe, parameter, key)
                # This hook sees one micro-batch's gradient, before autograd accumulates it and DDP averages
                # it. Newer kinds of hooks would receive the sum over micro-batches.
                self._handles.append(parameter.register_hook(observe))  # type: ignore[no-untyped-call]
        self._groups = [[one for one in group if id(one) in self._hooked] for group in groups]
        self.averages += [Averages()] * (len(groups) - len(self.averages))
        self._norms: list[list[Tensor]] = [[] for _ in groups]  # of all passes so far
        self._passes, self._in_pass = 0, False
        self._readings, self._pending = None, None
        self._begin_gradients()

    def commit(self) -> None:
        """Make the averages in ``pending`` permanent, after the optimizer has taken the step."""
        self.averages = self.pending.averages

    def unhook(self) -> None:
        """Remove all hooks permanently: later steps do not hook any parameter again."""
        self._is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    @property
    def complete(self) -> bool:
        """Whether all backward passes of the current step have run."""
        return self._readings is not None

    def refuse_between_passes(self, what: str) -> None:
        """Raise a RuntimeError if some but not all backward passes of the current step have run."""
        if self._passes and not self.complete:
            count = self.settings.num_passes
            raise RuntimeError(
                f"AdaScale: {what} after {self._passes} of num_gradients_to_accumulate={count} backward "
                f"passes; run {count} passes per step(), and call this after step() or zero_grad()"
            )

    @property
    def pending(self) -> Pending:
        """The moving averages, which include the current step after its last backward pass."""
        if self._readings is None:
            return Pending(self.averages, True)
        if self._pending is None:
            sums, squares = self._readings.tolist()  # waits for the device
            finite = all(map(math.isfinite, sums + squares))
            averages = self._with_sample(sums, squares) if finite else self.averages
            self._pending = Pending(averages, finite)
        return self._pending

    def gains(self) -> list[float]:
        """Return the gain of each parameter group, followed by the gain of all trained groups together."""
        estimates = [*self.pending.averages, self.pooled()]
        return [gain_ratio(one.variance, one.square, self.settings.scale) for one in estimates]

    def pooled(self) -> Averages:
        """Sum the averages over all trained parameter groups, or over all groups if none is trained."""
        averages = self.pending.averages
        pairs = zip(averages, self._is_trained(), strict=True)
        counted = [one for one, is_trained in pairs if is_trained] or averages
        return Averages(sum(one.variance for one in counted), sum(one.square for one in counted))

    def _is_trained(self) -> list[bool]:
        return [any(parameter.requires_grad for parameter in group) for group in self._groups]

    def _begin_gradients(self) -> None:
        # For one pass: the parameters that it reached, the parameters whose .grad is this pass's gradient,
        # and the other gradients, which are held here until their norms are computed.
        self._reached: set[int] = set()
        self._in_grad: list[Tensor] = []
        self._held: dict[Any, dict[int, Tensor]] = {}  # for each CUDA stream
        self._held_bytes = 0

    def _observe(self, parameter: Tensor, key: int, gradient: Tensor) -> None:
        settings = self.settings
        if not self._in_pass or key in self._reached:  # reached a second time within a reentrant checkpoint
            self._begin_pass()
        self._reached.add(key)
        if parameter.grad is None and not parameter._post_accumulate_grad_hooks:
            # autograd will use this very tensor as .grad. If we held a reference, autograd would copy it.
            if settings.num_ranks == 1:
                self._in_grad.append(parameter)
                return
            gradient = gradient.data  # DDP may replace .grad by a bucket view; this alias keeps the memory
        # A norm must be computed on the CUDA stream that computed the gradient.
        stream = torch.cuda.current_stream(gradient.device) if gradient.is_cuda else None
        self._held.setdefault(stream, {})[key] = gradient
        self._held_bytes += gradient.numel() * gradient.itemsize
        # After the last gradient, compute the norms at once, because with static_graph=True DDP's first
        # reduction runs before the callbacks at the end of the pass.
        is_last = settings.num_ranks > 1 and len(self._reached) == len(self._hooked)
        if is_last or self._held_bytes > _MAX_HELD_BYTES:
            self._add_norms(self._held.pop(stream))

    @torch.no_grad()
    def _add_norms(self, held: dict[int, Tensor]) -> None:
        self._held_bytes -= sum(gradient.numel() * gradient.itemsize for gradient in held.values())
        gradients = [[held[key] for one in group if (key := id(one)) in held] for group in self._groups]
        for norms, new in zip(self._norms, norms_by_group(gradients), strict=True):
            norms += new

    def _begin_pass(self) -> None:
        count = self.settings.num_passes
        if self._passes == count:
            # If GradScaler skipped the step, .grad is None and a new step begins. Otherwise the gradients of
            # two steps would mix.
            self.begin_step(self._groups)
            if any(parameter.grad is not None for parameter in self._hooked.values()):
                raise RuntimeError(
                    f"AdaScale: backward pass {count + 1} with num_gradients_to_accumulate={count}; "
                    f"call step() or zero_grad() after {count} passes, sum the losses of a micro-batch "
                    "before backward(), or raise num_gradients_to_accumulate (activation checkpointing needs "
                    "use_reentrant=False)"
                )
        self._passes += 1
        self._in_pass = True
        _call_after_backward(self._end_pass)

    def _end_pass(self) -> None:
        self._in_pass = False
        in_grad = {id(one): one.grad for one in self._in_grad if one.grad is not None}
        if not in_grad and len(self._in_grad) == len(self._reached):  # torch.autograd.grad() is not a pass
            self._passes -= 1
            self._begin_gradients()
            return
        for held in (in_grad, *self._held.values()):
            self._add_norms(held)
        self._begin_gradients()
        if self._passes == self.settings.num_passes:
            # Callbacks run in the order in which they were queued. DDP queued its callback, which waits for
            # the reduction, during the pass, so _measure runs after the reduction.
            _call_after_backward(self._measure)

    @torch.no_grad()
    def _measure(self) -> None:
        # This runs after DDP's reduction, and before the caller can change .grad, for example by clipping.
        settings = self.settings
        mean = [[grad for one in group if (grad := one.grad) is not None] for group in self._groups]
        readings = total_squares([*self._norms, *norms_by_group(mean)]).view(2, -1)
        sums, squares = readings
        if settings.num_ranks > 1:
            dist.all_reduce(sums)
        # Let c be the number of passes. If each loss is divided by c, a pass yields g_i / c and .grad is G.
        # Otherwise a pass yields g_i and .grad is c G.
        passes = settings.num_passes
        sums *= passes**2 if settings.is_scaled_loss else 1
        squares /= 1 if settings.is_scaled_loss else passes**2
        if settings.grad_scaler:
            # scale(1) is the only public way to read GradScaler's scale without waiting for the device.
            loss_scale = settings.grad_scaler.scale(torch.ones((), device=sums.device))
            readings /= loss_scale.to(sums.dtype) ** 2
        self._readings = readings

    def _with_sample(self, sums: list[float], squares: list[float]) -> list[Averages]:
        settings = self.settings
        averages = list(self.averages)
        for group, is_trained in enumerate(self._is_trained()):
            if is_trained:
                sample = estimate(sums[group], squares[group], settings.num_gradients, settings.scale)
                averages[group] = averages[group].updated(sample, settings.smoothing, settings.debias_ewma)
        return averages


def _call_after_backward(callback: Any) -> None:
    # torch has no public method for this; its own DDP and FSDP use the same private one.
    torch.autograd.Variable._execution_engine.queue_callback(callback)
