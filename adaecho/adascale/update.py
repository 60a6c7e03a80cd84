"""One step of the wrapped optimizer at scaled learning rates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def scaled_learning_rates(optimizer: Optimizer, factors: Sequence[float | Tensor]) -> Iterator[None]:
    """Multiply each group's ``lr`` by its factor within, and put the very same objects back afterwards.

    The same, since a schedule may hold a learning rate that is a tensor and write into it.

    Raises:
        RuntimeError: a hook of ``step()`` set ``lr``, which would have been lost, and in the step its gain.
    """
    base = [group["lr"] for group in optimizer.param_groups]
    scaled = [lr * factor for lr, factor in zip(base, factors, strict=True)]
    try:
        for group, lr in zip(optimizer.param_groups, scaled, strict=True):
            group["lr"] = lr
        yield
        if any(_was_set(group["lr"], lr) for group, lr in zip(optimizer.param_groups, scaled, strict=True)):
            raise RuntimeError(
                "AdaScale: lr was set within step(), by a hook of it or by the optimizer; that is not kept. "
                "Set it, or step the scheduler, after step()"
            )
    finally:
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr


def _was_set(lr: float | Tensor, scaled: float | Tensor) -> bool:
    # Schedulers write into a rate that is a tensor.
    written = isinstance(scaled, Tensor) and not scaled.is_inference() and scaled._version > 0
    return lr is not scaled or written


def step_on_host(
    optimizer: Optimizer, factors: Tensor, gain: Tensor, finite: Tensor
) -> tuple[Tensor, Tensor]:
    """Step at ``lr * factor`` if ``finite``, after reading all at once: the one synchronisation of a step.

    Args:
        optimizer: any.
        factors: of each group, float64 [num_groups].
        gain: the pooled one, a float64 scalar.
        finite: bool scalar.

    Returns:
        On the host: the pooled gain, and whether the step was taken.
    """
    host = torch.cat([factors, gain[None], finite[None].to(factors.dtype)]).cpu()  # float64 [num_groups + 2]
    taken = host[-1] > 0
    if taken:
        with scaled_learning_rates(optimizer, host[:-2].tolist()):
            optimizer.step()
    return host[-2], taken


def steps_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a step can be scaled, and skipped, without the host knowing: fused, with ``lr`` on the device.

    Not with dampening, whose first step must be known to be the first (see ``_start_momentum``).
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        isinstance(group["lr"], Tensor) and group["lr"].device == device and not group.get("dampening")
        for group in optimizer.param_groups
    )


def step_on_device(
    optimizer: Optimizer,
    factors: Sequence[Tensor],
    finite: Tensor,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
) -> None:
    """Step at ``lr * factor`` if ``finite`` and not ``found_inf``, decided by the fused kernel.

    Args:
        optimizer: a fused one, for which ``steps_on_device`` holds.
        factors: one scalar per group.
        finite: bool scalar.
        found_inf: GradScaler's verdict, > 0 for overflow.
        grad_scale: GradScaler's scale where gradients are still scaled.
    """
    _start_momentum(optimizer)
    skip = (~finite).float()
    optimizer.found_inf = skip if found_inf is None else torch.maximum(skip, found_inf.float())  # type: ignore[attr-defined]
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
    pairs = zip(factors, optimizer.param_groups, strict=True)
    try:
        with scaled_learning_rates(optimizer, [factor.to(group["lr"].dtype) for factor, group in pairs]):
            optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


def _start_momentum(optimizer: Optimizer) -> None:
    # Fused SGD allocates momentum without filling it and relies on its first kernel to do so, which a skipped
    # step does not: the next one would use what was in memory. Zeros give the same first step.
    for group in optimizer.param_groups:
        if not group.get("momentum"):
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
