"""The gain's statistics: from gradients to samples to averages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from adaecho.adascale.collector import GradientCollector
from adaecho.adascale.estimators import (
    Averages,
    StepGradient,
    estimate_across_gradients,
    estimate_between_steps,
    gain_ratio,
    step_gradient,
    updated,
)


@dataclass
class GainSettings:
    """AdaScale's arguments with their defaults filled in; ``num_passes`` is num_gradients_to_accumulate."""

    world_size: int
    num_passes: int
    scale: float
    smoothing: float
    is_scaled_loss: bool
    debias_ewma: bool
    grad_scaler: torch.amp.GradScaler | None
    rule: str

    @property
    def num_gradients(self) -> int:
        """Micro-batches of one step over all ranks."""
        return self.world_size * self.num_passes


class Sample(NamedTuple):
    """The statistics as they are to be once the coming step is taken.

    Attributes:
        averages: those of before with the new estimate, float64 [num_groups] each.
        gradient: the step's own, to be compared with the next one's; empty where a step has several.
        finite: bool scalar on the gradients' device, whether the step may be taken.
    """

    averages: Averages
    gradient: StepGradient
    finite: Tensor


Saved = tuple[Averages, StepGradient]


class GradientStatistics:
    """Averages of sigma^2 and mu^2 per parameter group, fed by hooks on the parameters.

    Nothing is committed at the end of backward: a step may still be given up.

    Args:
        groups: the parameters of each group.
        settings: AdaScale's.
        given_up: called with a sample's ``finite`` where its step was never asked for.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        settings: GainSettings,
        given_up: Callable[[Tensor], None],
    ) -> None:
        self.settings, self._given_up = settings, given_up
        # On the CPU until the first sample, then where the gradients are: float64 [num_groups] each.
        self.averages = Averages.empty(len(groups))
        self._next_is_repeated = self._is_repeated = False
        self._gradient: StepGradient = {}  # of the last step; only where a step has one gradient
        self._sample: Sample | None = None
        self.collector = GradientCollector(groups, settings.num_passes, self._take_mark, self._take_sample)

    @property
    def sample(self) -> Sample | None:
        """The coming step's sample, once all its backward passes are through."""
        return self._sample if self.collector.complete else None

    @property
    def current_averages(self) -> Averages:
        """The averages, the coming step's sample included where there is one."""
        return self.averages if self.sample is None else self.sample.averages

    def gains(self) -> Tensor:
        """Return the gain of each group, then the pooled one: float64 [num_groups + 1]."""
        variance, square = (
            torch.cat([average, self.pooled(average).reshape(1)])  # [num_groups + 1]
            for average in (self.current_averages.variance, self.current_averages.square)
        )
        return gain_ratio(variance, square, self.settings.scale)

    def pooled(self, average: Tensor) -> Tensor:
        """The sum of an average [num_groups] over the groups that are trained; a frozen one's is kept."""
        trained = self._trained
        if all(trained) or not any(trained):
            return average.sum()
        return torch.stack(
            [one for one, is_trained in zip(average, trained, strict=True) if is_trained]
        ).sum()

    @property
    def _trained(self) -> list[bool]:
        """Whether a step trains any parameter of each group."""
        return [any(parameter.requires_grad for parameter in group) for group in self.collector.groups]

    def rate_factors(self) -> Tensor:
        """Return what each group's learning rate is multiplied by under the rule: float64 [num_groups]."""
        gains = self.gains()[:-1]
        return gains ** {"gain": 1.0, "sqrt_gain": 0.5, "measure": 0.0}[self.settings.rule]

    def commit(self, sample: Sample, keep_gradient: bool) -> None:
        """Take in ``sample``, whose step was taken (or skipped: then it left the averages alone)."""
        self.averages, self._sample = sample.averages, None
        if keep_gradient:
            self._gradient = sample.gradient

    def mark_repeated_batch(self) -> None:
        """Take no sample across steps from the backward pass that comes next."""
        self._next_is_repeated = True

    def begin(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Begin a step: forget passes, and watch parameters that are new or have been unfrozen.

        A group that is new, if only to the wrapped optimizer, has averages of its own.
        """
        self._give_up()
        self.averages = self.averages.with_groups(len(groups))
        self.collector.hook(groups)

    def _give_up(self) -> None:
        # GradScaler withholds a step whose gradients overflowed: that one shows here alone.
        if self._sample is not None:
            self._given_up(self._sample.finite)
        self._sample = None

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Return averages and, in the order of ``parameters``, the last gradient: tensors, plain numbers."""
        return {
            **self.averages._asdict(),
            "scale": self.settings.scale,  # of the gradient
            "debias_ewma": self.settings.debias_ewma,
            "gradient": [self._gradient.get(parameter) for parameter in parameters] if self._gradient else [],
        }

    def read(self, state: Mapping[str, Any] | None, parameters: Sequence[Tensor]) -> Saved:
        """What ``restore`` continues from, out of a sound ``state_dict()``, or of nothing; changes nothing.

        Raises:
            ValueError: of another number of groups or parameters, or averaged in the other way.
        """
        num_groups, debias_ewma = len(self.averages.weight), self.settings.debias_ewma
        if state is None:
            return Averages.empty(num_groups), {}
        averages = Averages(*(state[name].to("cpu", torch.float64) for name in Averages._fields))
        if len(averages.weight) != num_groups:
            raise ValueError(
                f"AdaScale: the checkpoint has statistics of {len(averages.weight)} parameter group(s), the "
                f"optimizer has {num_groups}; build the same groups before loading"
            )
        if state["debias_ewma"] not in (debias_ewma, None):
            raise ValueError(
                f"AdaScale: the checkpoint was averaged with debias_ewma={state['debias_ewma']}, the "
                f"optimizer has debias_ewma={debias_ewma}; use the checkpoint's"
            )
        scale = state.get("scale", self.settings.scale)
        # The noise of another S is in the gradient, but not in the averages.
        as_large = isinstance(scale, float | int) and scale == self.settings.scale
        gradient = (state["gradient"] if as_large else []) or [None] * len(parameters)
        if [None if copy is None else copy.shape for copy in gradient] != [
            None if copy is None else parameter.shape
            for parameter, copy in zip(parameters, gradient, strict=False)
        ]:
            raise ValueError(
                "AdaScale: the checkpoint has the gradient of another model; load it into its own"
            )
        return averages, {
            parameter: copy.to(parameter.device)
            for parameter, copy in zip(parameters, gradient, strict=True)
            if copy is not None
        }

    def restore(self, saved: Saved) -> None:
        """Continue from what ``read`` gave."""
        self._sample = None
        self.averages, self._gradient = saved

    def _take_mark(self) -> None:
        self._give_up()
        # The mark is of the step that begins here, and gone with it, whether or not it is taken.
        self._is_repeated, self._next_is_repeated = self._next_is_repeated, False

    @torch.no_grad()
    def _take_sample(self) -> None:
        # At the end of the last backward pass: after DDP's reduction, before .grad can be touched.
        sums = self.collector.sums_of_squares()  # float64 [num_groups], of this rank
        if self.settings.world_size > 1:
            # A copy: reentrant checkpoints come here within a pass, and the collector adds to its own then.
            sums = sums.clone()
            dist.all_reduce(sums)
        averages = self.averages.to(sums.device)
        across = self._across_gradients if self.settings.num_gradients > 1 else self._across_steps
        self._sample = across(averages, sums)

    def _across_gradients(self, averages: Averages, sums: Tensor) -> Sample:
        settings = self.settings
        squares = self.collector.squares_of_accumulated()  # float64 [num_groups], the same on all ranks
        # If losses are divided by c, a pass brings g_i / c and .grad is G; else g_i, and .grad is c G.
        divided = settings.num_passes if settings.is_scaled_loss else 1
        summed = 1 if settings.is_scaled_loss else settings.num_passes
        loss_scale = self._loss_scale(sums)
        estimate = estimate_across_gradients(
            sums * (divided / loss_scale) ** 2,
            squares / (summed * loss_scale) ** 2,
            settings.num_gradients,
            settings.scale,
        )
        # Made on the device, so nothing waits.
        has_sample = torch.stack([torch.full_like(sums[0], is_trained) for is_trained in self._trained]) > 0
        averages = updated(averages, estimate, settings.smoothing, settings.debias_ewma, has_sample)
        return Sample(averages, {}, torch.isfinite(sums + squares).all())

    def _across_steps(self, averages: Averages, sums: Tensor) -> Sample:
        finite = torch.isfinite(sums).all()
        if self._is_repeated:
            return Sample(averages, self._gradient, finite)
        groups = self.collector.groups
        gradient = step_gradient(groups, 1 / self._loss_scale(sums))
        if self._gradient:
            estimate, has_sample = estimate_between_steps(
                self._gradient, gradient, groups, self.settings.scale
            )
            # A gradient that is not finite may be of a parameter that the sample leaves out.
            settings, has_sample = self.settings, has_sample & finite
            averages = updated(averages, estimate, settings.smoothing, settings.debias_ewma, has_sample)
        return Sample(averages, gradient, finite)

    def _loss_scale(self, like: Tensor) -> Tensor:
        one = torch.ones((), device=like.device)  # float32, as GradScaler's scale is
        # scale(1) is GradScaler's public way to its scale that does not wait for the device.
        scaler = self.settings.grad_scaler
        return (one if scaler is None else scaler.scale(one)).to(like.dtype)
