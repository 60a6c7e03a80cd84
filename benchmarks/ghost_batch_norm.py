"""Compare the speed of ghost batch norm, plain batch norm, and a simple loop over slices of the batch.

Ghost batch norm normalizes each slice of a batch separately. The benchmark times one forward and backward
pass of a layer. A ratio is the median time of a layer divided by that of plain batch norm.

Run: python -m benchmarks.ghost_batch_norm [threads]
"""

import statistics
import sys
import time
from functools import partial

import torch
from torch import nn

from adaecho.models.ghost_batch_norm import GhostBatchNorm2d
from benchmarks import record
from benchmarks.peers import sides

# Batch size, channels and side of the first stage of a CIFAR net, and of stages 1 and 3 of ResNet-50 on
# ImageNet.
SHAPES = ((128, 64, 32), (64, 256, 56), (64, 1024, 14))
GHOST_SIZE = 32
ROUNDS = 41
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}


class Loop(nn.BatchNorm2d):
    """The usual implementation of ghost batch norm: plain batch norm on one slice after another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(Loop, self).forward(part) for part in x.chunk(len(x) // GHOST_SIZE)])


def step_s(norm: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> float:
    """Return the seconds of one forward and backward pass of a layer."""
    begin = time.perf_counter()
    x.grad = None
    norm(x).backward(gradient)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - begin


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for batch, channels, side in SHAPES:
        for layout, memory_format in LAYOUTS.items():
            x, gradient = (
                torch.randn(batch, channels, side, side, device=device).to(memory_format=memory_format)
                for _ in range(2)
            )
            norms = {
                "plain": nn.BatchNorm2d(channels),
                "ghost": GhostBatchNorm2d(channels, GHOST_SIZE),
                "loop": Loop(channels),
            }
            turns = {
                name: partial(step_s, norm.to(device), x.clone().requires_grad_(), gradient)
                for name, norm in norms.items()
            }
            found = sides.take_turns(turns, ROUNDS + 1)
            seconds = {name: spent[1:] for name, spent in found.items()}  # the first round warms up
            plain_s = statistics.median(seconds["plain"])
            rows += [
                {
                    "shape": f"{batch}x{channels}x{side}x{side}",
                    "layout": layout,
                    "norm": name,
                    "device": device.type,
                    "threads": torch.get_num_threads(),
                    "median_s": statistics.median(spent),
                    "min_s": min(spent),
                    "times_plain": statistics.median(spent) / plain_s,
                }
                for name, spent in seconds.items()
            ]
    record.write("ghost_batch_norm", rows, gpu=record.gpu())


if __name__ == "__main__":
    main()
