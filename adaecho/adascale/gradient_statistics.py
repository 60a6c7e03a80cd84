"""The gain's statistics: from the gradients of each backward pass to samples to averages."""

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

from adaecho.adascale.estimators import (
    Averages,
    Estimate,
    estimate_across_gradients,
    estimate_across_steps,
    gain_ratio,
    squares_by_group,
)

# By id of the parameter: the hash of a tensor is a Python function, which takes as long as a hook.
Gradients = dict[int, Tensor]

_MOST_HELD = 64 << 20  # bytes of one pass's gradients that are kept until they are squared together


@dataclass(frozen=True)
class Settings:
    """AdaScale's arguments with their defaults filled in; ``num_passes`` is num_gradients_to_accumulate."""

    num_ranks: int
    num_passes: int
    scale: float
    smoothing: float
    is_scaled_loss: bool
    debias_ewma: bool
    grad_scaler: torch.amp.GradScaler | None

    @property
    def num_gradients(self) -> int:
        """Micro-batches of one step over all ranks."""
        return self.num_ranks * self.num_passes


class Coming(NamedTuple):
    """The averages as they are once the coming step is taken, and whether its gradients are all finite."""

    averages: list[Averages]
    finite: bool


class GradientStatistics:
    """Averages of sigma^2 and mu^2 per parameter group, fed by a hook on each parameter.

    The hook (``Tensor.register_hook``) sees the gradient of one micro-batch, before it is accumulated and
    before DistributedDataParallel reduces it. torch's newer hooks come too late: a post-accumulate-grad hook
    sees the sum of the micro-batches, DDP's communication hook what no_sync() has summed up. The hook only
    keeps a reference: the squares are taken of many gradients at once, at the end of the pass or before.

    One call of ``backward()`` that reaches a parameter is one pass. Nothing is committed at the end of a
    step's last pass: GradScaler may still withhold the step.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], settings: Settings) -> None:
        self.settings = settings
        self.averages: list[Averages] = []
        self.skipped_steps = 0
        # Across steps only: the last step's gradient, the coming one's, and whether a batch comes again.
        self.gradient: Gradients = {}
        self._next_gradient: Gradients = {}
        self._marked = self._is_repeat = False
        self._watched: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._readings: Tensor | None = None  # of all passes of a step: [1 or 2, num_groups]
        self._coming: Coming | None = None
        self.begin(groups)

    def begin(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Begin a step: forget the passes so far, and watch parameters that are new or have been unfrozen."""
        self._forget()
        for parameter in chain.from_iterable(groups):
            if parameter.requires_grad and (key := id(parameter)) not in self._watched:
                self._watched[key] = parameter
                see = partial(self._see, parameter, key)
                self._handles.append(parameter.register_hook(see))  # type: ignore[no-untyped-call]
        self._groups = [
            [parameter for parameter in group if id(parameter) in self._watched] for group in groups
        ]
        self.averages = [*self.averages, *[Averages()] * (len(groups) - len(self.averages))]

    def commit(self) -> None:
        """Take in the sample of a step that was taken."""
        self.averages = self.coming.averages
        self.gradient = self._next_gradient

    def mark_repeated_batch(self) -> None:
        """Take no sample across steps from the backward pass that comes next."""
        self._marked = True

    def unhook(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()

    @property
    def complete(self) -> bool:
        """Whether all backward passes of a step have been seen."""
        return self._readings is not None

    def refuse_between_passes(self, what: str) -> None:
        """Raise RuntimeError if a step's backward passes have begun and are not complete."""
        if self._passes and not self.complete:
            count = self.settings.num_passes
            raise RuntimeError(
                f"AdaScale: {what} after {self._passes} of num_gradients_to_accumulate={count} backward "
                f"passes; make {count} for each step(), and call it after step() or zero_grad()"
            )

    @property
    def coming(self) -> Coming:
        """What is known before ``step()``; waits for the device, once a step."""
        if self._readings is None:
            return Coming(self.averages, True)
        if self._coming is None:
            readings = self._readings.tolist()
            finite = all(map(math.isfinite, (number for row in readings for number in row)))
            self._coming = Coming(self._with_sample(readings) if finite else self.averages, finite)
        return self._coming

    def gains(self) -> list[float]:
        """Return the gain of each group, then the pooled one."""
        estimates = [*self.coming.averages, self.pooled()]
        return [gain_ratio(one.variance, one.square, self.settings.scale) for one in estimates]

    def pooled(self) -> Averages:
        """The sums of the averages over the groups that are trained; over all, where none is."""
        averages = self.coming.averages
        pairs = zip(averages, self._trained, strict=True)
        counted = [one for one, is_trained in pairs if is_trained] or averages
        return Averages(sum(one.variance for one in counted), sum(one.square for one in counted))

    @property
    def _trained(self) -> list[bool]:
        return [any(parameter.requires_grad for parameter in group) for group in self._groups]

    def _forget(self) -> None:
        self.skipped_steps += not self.coming.finite
        self._passes, self._in_pass = 0, False
        self._begin_gradients()
        self._sums: Tensor | None = None  # float64 [num_groups], of the passes so far
        self._readings, self._coming = None, None

    def _begin_gradients(self) -> None:
        # Of one pass: the parameters reached, those whose gradient .grad holds, and the other gradients.
        self._seen: set[int] = set()
        self._in_grad: list[Tensor] = []
        self._held: Gradients = {}
        self._held_bytes = 0

    def _see(self, parameter: Tensor, key: int, gradient: Tensor) -> None:
        if not self._in_pass or key in self._seen:  # again: within a reentrant checkpoint
            self._begin_pass()
        self._seen.add(key)
        # Where .grad is None it becomes this very tensor: it can be read there at the end of the pass, and
        # keeping it here would make autograd copy it. It is kept if .grad may change before: DDP reduces it,
        # a hook after accumulation may do anything.
        is_local = self.settings.num_ranks == 1
        if parameter.grad is None and is_local and not parameter._post_accumulate_grad_hooks:
            self._in_grad.append(parameter)
            return
        self._held[key] = gradient
        self._held_bytes += gradient.numel() * gradient.itemsize
        if self._held_bytes > _MOST_HELD:
            self._add_squares()

    @torch.no_grad()
    def _add_squares(self) -> None:
        squares = self._squares(self._by_group(self._held))
        self._sums = squares if self._sums is None else self._sums + squares
        self._held, self._held_bytes = {}, 0

    def _by_group(self, gradients: Gradients) -> list[list[Tensor]]:
        return [[gradients[key] for one in group if (key := id(one)) in gradients] for group in self._groups]

    def _squares(self, gradients: list[list[Tensor]]) -> Tensor:
        if not any(gradients):
            some = next(iter(self._watched.values()))
            gradients = [[torch.zeros(0, device=some.device)], *gradients[1:]]
        return squares_by_group(gradients)

    def _begin_pass(self) -> None:
        count = self.settings.num_passes
        if self._passes == count:
            # Right after a step that was given up (GradScaler skips on overflow) .grad is gone and a new step
            # begins; otherwise the gradients of two steps are being mixed.
            self._forget()
            if any(parameter.grad is not None for parameter in self._watched.values()):
                raise RuntimeError(
                    f"AdaScale: backward pass {count + 1} of a step that has num_gradients_to_accumulate="
                    f"{count}. Call step() or optimizer.zero_grad() after {count}, add up losses that are of "
                    "one pass before backward(), or make AdaScale with as many as there are. (Activation "
                    "checkpoints need use_reentrant=False.)"
                )
        if self._passes == 0:
            self._is_repeat, self._marked = self._marked, False
        self._passes += 1
        self._in_pass = True
        _call_after_backward(self._end_pass)

    def _end_pass(self) -> None:
        self._in_pass = False
        for parameter in self._in_grad:
            if (gradient := parameter.grad) is not None:  # torch.autograd.grad leaves none
                self._held[id(parameter)] = gradient
        self._add_squares()
        self._begin_gradients()
        if self._passes == self.settings.num_passes:
            # Callbacks run in the order they were queued; DDP queued its own (which waits for the reduction)
            # during the pass, so this one runs after it.
            _call_after_backward(self._measure)

    @torch.no_grad()
    def _measure(self) -> None:
        # At the end of the last backward pass: after DDP's reduction, before .grad can be touched.
        settings, sums = self.settings, self._sums
        assert sums is not None
        if settings.num_ranks > 1:
            dist.all_reduce(sums)
        loss_scale: Any = 1.0
        if settings.grad_scaler:
            # scale(1) is GradScaler's public way to its scale, a float32, that does not wait for the device.
            loss_scale = settings.grad_scaler.scale(torch.ones((), device=sums.device)).to(sums.dtype)
        if settings.num_gradients > 1:
            # If losses are divided by c, a pass brings g_i / c and .grad is G; else g_i, and .grad is c G.
            divided, summed = (
                (settings.num_passes, 1) if settings.is_scaled_loss else (1, settings.num_passes)
            )
            mean = [[grad for one in group if (grad := one.grad) is not None] for group in self._groups]
            squares = self._squares(mean) / (summed * loss_scale) ** 2
            self._readings = torch.stack([sums * (divided / loss_scale) ** 2, squares])
            return
        self._readings, self._next_gradient = sums[None], self.gradient
        if self._is_repeat:
            return
        trained = {key: one for key, one in self._watched.items() if one.requires_grad}
        now = torch._foreach_mul([_widened(one) for one in trained.values()], 1 / loss_scale)
        self._next_gradient = dict(zip(trained, now, strict=True))
        # Where a parameter was added, frozen or unfrozen, its missing gradient is not zero but unknown.
        if self.gradient.keys() == self._next_gradient.keys():
            change = torch._foreach_sub(now, [self.gradient[key] for key in trained])
            between = dict(zip(trained, change, strict=True))
            before, after, difference = (
                self._squares(self._by_group(one)) for one in (self.gradient, self._next_gradient, between)
            )
            # |a - b|^2 = |a|^2 + |b|^2 - 2 <a, b>: no kernel multiplies lists of tensors and adds up.
            self._readings = torch.stack([difference, (before + after - difference) / 2])

    def _with_sample(self, readings: list[list[float]]) -> list[Averages]:
        settings = self.settings
        if len(readings) == 1:
            return self.averages
        return [
            averages.updated(self._sample(*numbers), settings.smoothing, settings.debias_ewma)
            if trained
            else averages
            for averages, trained, *numbers in zip(self.averages, self._trained, *readings, strict=True)
        ]

    def _sample(self, one: float, other: float) -> Estimate:
        settings = self.settings
        if settings.num_gradients > 1:
            return estimate_across_gradients(one, other, settings.num_gradients, settings.scale)
        return estimate_across_steps(one, other, settings.scale)

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Averages and, in the order of ``parameters``, the last gradient: tensors and plain numbers."""
        return {
            **{
                name: torch.tensor([getattr(one, name) for one in self.averages], dtype=torch.float64)
                for name in Averages._fields
            },
            "scale": self.settings.scale,
            "gradient": [self.gradient.get(id(one)) for one in parameters] if self.gradient else [],
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Continue from ``state_dict()``."""
        columns = [state[name].tolist() for name in Averages._fields]
        self.averages = [Averages(*numbers) for numbers in zip(*columns, strict=True)]
        # The noise of another scale is in the gradient, but not in the averages.
        gradients = state["gradient"] if state["scale"] == self.settings.scale else []
        self.gradient = {
            id(parameter): gradient.to(parameter.device)
            for parameter, gradient in zip(parameters, gradients, strict=False)
            if gradient is not None
        }
        self.skipped_steps = state["skipped_steps"]


def _widened(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:  # the step did not reach it: zero
        gradient = torch.zeros_like(parameter)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense if dense.dtype == torch.float64 else dense.float()


def _call_after_backward(callback: Any) -> None:
    # torch's own FSDP and DDP use the same door; there is no public one.
    torch.autograd.Variable._execution_engine.queue_callback(callback)
