"""Ghost ("virtual") batch norm: statistics over slices of a batch, so that it can grow without changing them.

E. Hoffer, I. Hubara, D. Soudry, "Train longer, generalize better", 2017, algorithm 1.
"""

from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from adaecho.errors import ConfigError

Statistics = Literal["average", "sequential"]
STATISTICS: tuple[Statistics, ...] = get_args(Statistics)
BLOCK = 2**17  # numbers: 512 KiB, at home in a core's second-level cache


class GhostBatchNorm2d(nn.BatchNorm2d):
    """Batch norm in which every slice of ``ghost_size`` examples is normalised by its own statistics.

    In training it equals ``nn.BatchNorm2d`` on each slice. Slice i of k holds the examples i, i + k, ... of a
    batch stored as NCHW, and ``ghost_size`` successive examples of one stored as channels_last: in both
    layouts those that need no copy. Batches are shuffled, so the choice has no meaning of its own.

    In evaluation all examples are normalised by running statistics r, for which there are two readings. With
    the statistics s_0, ..., s_{k-1} of a step's slices and ``momentum`` n:

    * "average": r <- (1 - n) r + n mean(s_i). It is what the mean of k running averages, one per slice, would
      be, as the init2winit code base keeps them.
    * "sequential": r <- (1 - n)^k r + sum_i n (1 - n)^(k-1-i) s_i. Hoffer et al., algorithm 1: k updates.

    Args:
        num_features: channels C.
        ghost_size: examples per slice, at least 1.
        statistics: "average" or "sequential".
        eps: added to variances.
        momentum: share n of a new value in the running statistics, in [0, 1].

    Raises:
        ValueError: in training, a batch that ``ghost_size`` doesn't divide.
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
        if ghost_size < 1:
            raise ValueError(f"ghost_size={ghost_size}: must be at least 1")
        if statistics not in STATISTICS:
            raise ValueError(f"statistics={statistics!r}: must be one of {', '.join(STATISTICS)}")
        self.ghost_size, self.statistics = ghost_size, statistics

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float [N, C, H, W] to the same shape and layout."""
        if not self.training:
            return super().forward(x)
        number = len(x)
        if number == 0 or number % self.ghost_size:
            raise ValueError(
                f"ghost batch norm: a batch of {number} examples is not made of slices of {self.ghost_size}; "
                "choose a batch size that the ghost size divides"
            )
        slices = number // self.ghost_size
        means, variances = x.new_zeros(2, slices, self.num_features, dtype=torch.float32)
        result: torch.Tensor
        if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
            result = self._interleaved(x, means, variances)
        elif torch.compiler.is_compiling():
            result = self._traceable(x, means, variances)
        else:
            result = _Successive.apply(x, self.weight, self.bias, means, variances, self.eps)
        self._update(means, variances)
        return result

    def _interleaved(self, x: torch.Tensor, means: torch.Tensor, variances: torch.Tensor) -> torch.Tensor:
        """Slices as channels: [S k, C, H, W] is [S, k C, H, W] in the same memory."""
        slices, channels = means.shape
        viewed = x.contiguous().view(self.ghost_size, slices * channels, *x.shape[2:])
        weight, bias = self.weight.repeat(slices), self.bias.repeat(slices)
        return functional.batch_norm(
            viewed, means.view(-1), variances.view(-1), weight, bias, True, 1.0, self.eps
        ).view(x.shape)

    def _traceable(self, x: torch.Tensor, means: torch.Tensor, variances: torch.Tensor) -> torch.Tensor:
        """Normalise the slices in operations that ``torch.compile`` fuses: it refuses writes into parts."""
        slices = x.view(len(means), self.ghost_size, *x.shape[1:])  # [k, S, C, H, W]
        over, broad = (1, 3, 4), (slice(None), None, slice(None), None, None)
        variance, mean = torch.var_mean(slices.float(), over, correction=0)  # [k, C]
        size = slices[0].numel() // self.num_features
        means.copy_(mean.detach())
        variances.copy_(variance.detach() * (size / (size - 1)))
        scale = torch.rsqrt(variance + self.eps) * self.weight
        result = (slices - mean[broad]) * scale[broad] + self.bias[None, None, :, None, None]
        return result.to(x.dtype).view(x.shape)

    @torch.no_grad()
    def _update(self, means: torch.Tensor, variances: torch.Tensor) -> None:
        assert self.momentum is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        slices = len(means)
        if self.statistics == "average":
            kept, share = 1 - self.momentum, means.new_full((slices,), self.momentum / slices)
        else:
            later = torch.arange(slices - 1, -1, -1, dtype=means.dtype, device=means.device)
            kept, share = (1 - self.momentum) ** slices, self.momentum * (1 - self.momentum) ** later
        self.running_mean.mul_(kept).add_(share @ means)
        self.running_var.mul_(kept).add_(share @ variances)
        self.num_batches_tracked.add_(1)

    def extra_repr(self) -> str:
        """The main arguments, for ``print(model)``."""
        return f"{self.num_features}, ghost_size={self.ghost_size}, statistics={self.statistics}"


class _Successive(torch.autograd.Function):
    """Batch norm on k successive slices, each written where it belongs: ``torch.cat`` copies the batch twice.

    In channels_last the view that ``_interleaved`` takes would be a copy; successive examples are none.

    x is [N, C, H, W], weight and bias [C]; means and variances [k, C] are written to.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        means: torch.Tensor,
        variances: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        result = torch.empty_like(x)
        saved_means, saved_inverses = torch.empty_like(means), torch.empty_like(means)
        parts = [part.chunk(len(means)) for part in (x, result)]
        for i, (part, out) in enumerate(zip(*parts, strict=True)):
            torch.ops.aten.native_batch_norm.out(
                part, weight, bias, means[i], variances[i], True, 1.0, eps,
                out=out, save_mean=saved_means[i], save_invstd=saved_inverses[i],
            )  # fmt: skip
        ctx.save_for_backward(x, weight, saved_means, saved_inverses)
        ctx.eps = eps
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, means, inverses = ctx.saved_tensors
        for_x, of_weights, of_biases = torch.empty_like(x), [], []
        parts = [part.chunk(len(means)) for part in (gradient, x, for_x)]
        for i, (part_gradient, part, out) in enumerate(zip(*parts, strict=True)):
            _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                part_gradient, part, weight, None, None, means[i], inverses[i], True, ctx.eps,
                [False, True, True],
            )  # fmt: skip
            _write_gradient(part_gradient, part, weight, means[i], inverses[i], of_weight, of_bias, out)
            of_weights.append(of_weight)
            of_biases.append(of_bias)
        return for_x, torch.stack(of_weights).sum(0), torch.stack(of_biases).sum(0), None, None, None


def _write_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    of_weight: torch.Tensor,
    of_bias: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The gradient for one slice's x, from those for weight and bias (Ioffe and Szegedy 2015, section 3).

    With M numbers a channel and i = 1 / sqrt(var + eps):
    out = weight i (gradient - of_bias / M - (x - mean) i of_weight / M).
    torch returns it in new memory, of which the page faults, and a copy to where it belongs, cost
    as much again; blocks that fit a cache are written in place. gradient, x, out: [S, C, H, W].
    """
    blocks = [part.permute(0, 2, 3, 1).reshape(-1, len(mean)) for part in (gradient, x)]
    blocks.append(out.permute(0, 2, 3, 1).view(-1, len(mean)))  # [M, C], the same memory in channels_last
    size = len(blocks[0])
    scale = weight * inverse
    slope, shift = -scale * inverse * of_weight / size, -scale * of_bias / size
    rows = max(1, BLOCK // len(mean)) if x.device.type == "cpu" else size
    for block_gradient, block, block_out in zip(*(torch.split(part, rows) for part in blocks), strict=True):
        centred = block - mean
        torch.addcmul(shift, centred, slope, out=centred)
        torch.addcmul(centred, block_gradient, scale, out=block_out)


def use_ghost_batch_norm(model: nn.Module, ghost_size: int, statistics: Statistics = "average") -> nn.Module:
    """The model with every ``nn.BatchNorm2d`` replaced, in place, weights and running statistics kept.

    Raises:
        ConfigError: the model has none, or batch norm of another kind.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            if type(module) is not nn.BatchNorm2d or module.momentum is None or not module.affine:
                raise ConfigError(
                    f"task.ghost_size={ghost_size}: the model's {name} is a {type(module).__name__}, and "
                    "only plain nn.BatchNorm2d has a ghost form here; choose another model, or "
                    "task.ghost_size=null"
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
        raise ConfigError(
            f"task.ghost_size={ghost_size}: the model has no batch norm; choose task.ghost_size=null"
        )
    return model


def check_ghost_size(
    ghost_size: int | None, batch_size: int, num_micro_batches: int, num_ranks: int = 1
) -> None:
    """Refuse, before anything is read, batches that slices of ``ghost_size`` don't make up.

    Args:
        ghost_size: None where batch norm is over whole (micro-)batches.
        batch_size: examples of one step, on this rank.
        num_micro_batches: parts that a step's batch is dealt to (AdaScale), on each rank.
        num_ranks: to which the whole batch is dealt, ``batch_size`` examples each.

    Raises:
        ConfigError: it doesn't divide them.
    """
    if ghost_size is None:
        return
    if ghost_size < 1:
        raise ConfigError(f"task.ghost_size={ghost_size}: must be at least 1, or null for plain batch norm")
    micro_batch, rest = divmod(batch_size, num_micro_batches)
    if rest or micro_batch % ghost_size:
        shares = f" on {num_ranks} ranks, {batch_size} each," if num_ranks > 1 else ""
        parts = f" in {num_micro_batches} micro-batches" if num_micro_batches > 1 else ""
        raise ConfigError(
            f"task.ghost_size={ghost_size}: batch_size={batch_size * num_ranks}{shares}{parts} is not made "
            f"of slices of {ghost_size}; choose sizes that divide, or task.ghost_size=null"
        )
