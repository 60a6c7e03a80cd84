"""Refuses what AdaScale can't take before it does harm, and fills in the defaults of its arguments."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

_MADE_FOR: dict[str, tuple[type[Optimizer], ...]] = {
    "gain": (torch.optim.SGD,),
    "sqrt_gain": (torch.optim.Adam, torch.optim.AdamW),
}
RULES = (*_MADE_FOR, "measure")
_ANEW = "make an AdaScale with another {} and let it load this one's state_dict()"
OF_FAIRSCALE = {  # its methods that there are not here: what to do instead
    "set_scale": _ANEW.format("scale="),
    "set_num_gradients_to_accumulate": _ANEW.format("num_gradients_to_accumulate="),
}


def check_parameters(parameters: Iterable[Tensor]) -> None:
    """Refuse sharded, lazy and complex parameters and parameters on several devices.

    Raises:
        ValueError: FSDP, FSDP2 or DTensor parameters, lazy or complex ones, or more than one device.
    """
    devices = set()
    for parameter in parameters:
        devices.add(parameter.device)
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(
                "AdaScale: a parameter of a lazy module has no shape yet; run the model once before"
            )
        # FSDP marks its flat parameters and those it shards; FSDP2 and tensor parallelism use DTensor.
        if hasattr(parameter, "_local_tensor") or getattr(parameter, "_fsdp_flattened", False):
            raise ValueError(
                "AdaScale: a parameter is sharded (FSDP, FSDP2 or DTensor), so no rank sees the gradient of "
                "one micro-batch whose norm the gain needs. Use DistributedDataParallel, with "
                "torch.distributed.optim.ZeroRedundancyOptimizer to shard the optimizer's state"
            )
        if parameter.is_complex():
            raise ValueError(
                "AdaScale: a parameter is complex; use torch.view_as_real of it, which SGD steps alike"
            )
    if len(devices) > 1:
        names = sorted(str(device) for device in devices)
        raise ValueError(
            f"AdaScale: parameters on several devices ({', '.join(names)}); one process drives one"
        )


def check_optimizer(optimizer: Optimizer, rule: str) -> None:
    """Refuse an optimizer whose step can't be scaled from outside, or that a rule is not meant for.

    Optimizers that are not torch's are taken as they come.

    Raises:
        TypeError: it is no optimizer.
        ValueError: no such rule; ZeroRedundancyOptimizer steps inside DDP's hooks; LBFGS evaluates several
            times a step; or the rule was made for another kind of optimizer.
    """
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
        raise TypeError(
            f"AdaScale: a {type(optimizer).__name__} is no optimizer; write "
            "AdaScale(torch.optim.SGD(model.parameters(), lr=...), ...)"
        )
    if rule not in RULES:
        raise ValueError(f"AdaScale: rule={rule!r}: must be one of {', '.join(RULES)}")
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise ValueError(
            "AdaScale: ZeroRedundancyOptimizer(overlap_with_ddp=True) updates parameters during backward, "
            "before the gain is known; use overlap_with_ddp=False"
        )
    stepping = getattr(optimizer, "optim", optimizer)  # that of a ZeroRedundancyOptimizer
    name = type(stepping).__name__
    if isinstance(stepping, torch.optim.LBFGS):
        raise ValueError(
            "AdaScale: LBFGS searches along a line with several evaluations a step, so a step has no rate to "
            "scale and no one gradient to measure; use LBFGS by itself, or SGD here"
        )
    of_torch = any(
        kind.__module__.startswith("torch.optim.") for kind in type(stepping).__mro__ if kind != Optimizer
    )
    if rule == "measure" or not of_torch or isinstance(stepping, _MADE_FOR[rule]):
        return
    remedies = [
        f'rule="{own}" is the rule for it' for own, kinds in _MADE_FOR.items() if isinstance(stepping, kinds)
    ]
    remedy = "; ".join([*remedies, 'rule="measure" reads the gain and leaves the rate alone'])
    if rule == "sqrt_gain":
        raise ValueError(f'AdaScale: rule="sqrt_gain" is for Adam and AdamW, not for {name}; {remedy}')
    raise ValueError(
        f"AdaScale: around {name}, which divides the gradient by its own size, lr times the gain is too "
        f"large: AdaScale's theory is of SGD. {remedy}"
    )


def refuse_unseen_gradients(parameters: Iterable[Tensor]) -> None:
    """Refuse a step whose gradients no hook has seen.

    Raises:
        RuntimeError: there are gradients.
    """
    if any(parameter.grad is not None for parameter in parameters):
        raise RuntimeError(
            "AdaScale: step() with gradients that no backward pass brought (set by hand, or after "
            "unhook()), so their gain is unknown; step the wrapped optimizer instead"
        )


def check_ranks(num_ranks: int) -> None:
    """Refuse a step where the ranks are others than when AdaScale was made.

    Raises:
        RuntimeError: each would take its own gain, and their models would drift apart.
    """
    if _num_ranks() != num_ranks:
        raise RuntimeError(
            f"AdaScale: made where torch.distributed had {num_ranks} rank(s), and now there are "
            f"{_num_ranks()}; make it after init_process_group, Accelerator() or fabric.launch(), or give "
            "world_size=1 where each rank trains a model of its own"
        )


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def checked_numbers(
    world_size: int | None, scale: float | None, smoothing: float | None, num_gradients_to_accumulate: int
) -> tuple[int, int, float, float]:
    """Fill in the defaults of AdaScale's numbers.

    Returns:
        Ranks, passes of a step, S and theta: the first four of ``GainSettings``.

    Raises:
        ValueError: one of them can't be.
    """
    ranks = _num_ranks()
    if world_size not in (None, 1, ranks):
        raise ValueError(
            f"AdaScale: world_size={world_size}, but torch.distributed has {ranks} rank(s) by now; make it "
            "after init_process_group and leave world_size out, or give 1 where each rank trains a model of "
            "its own"
        )
    if num_gradients_to_accumulate != int(num_gradients_to_accumulate) or num_gradients_to_accumulate < 1:
        raise ValueError(
            f"AdaScale: num_gradients_to_accumulate={num_gradients_to_accumulate!r}: a whole number >= 1 of "
            "backward passes"
        )
    num_passes, world_size = int(num_gradients_to_accumulate), ranks if world_size is None else world_size
    num_gradients = world_size * num_passes
    if scale is None and num_gradients == 1:
        raise ValueError(
            "AdaScale: one process without gradient accumulation has one gradient a step. Give scale= (how "
            "many base batches it averages over; the variance is then taken across steps), or "
            "num_gradients_to_accumulate >= 2"
        )
    scale = float(num_gradients if scale is None else scale)
    if not (math.isfinite(scale) and scale >= 1):
        raise ValueError(f"AdaScale: scale={scale}: a step averages over at least one base batch, so >= 1")
    if smoothing is None:
        # Appendix B.3, with one gradient for each base batch: an average spans 1000 base batches.
        smoothing = max(1 - (num_gradients if num_gradients > 1 else scale) / 1000, 0.0)
    if not 0 <= smoothing < 1:
        raise ValueError(
            f"AdaScale: smoothing={smoothing}: must be in [0, 1); 0 uses each step's estimate alone"
        )
    return world_size, num_passes, scale, float(smoothing)
