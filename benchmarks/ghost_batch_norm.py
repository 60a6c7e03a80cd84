"""Ghost batch norm beside plain batch norm and a loop over slices: forward and backward of one layer.

Run: python -m benchmarks.ghost_batch_norm [threads]
The variants take turns, so that a change of the machine's speed meets all of them; ratios are of medians.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from adaecho.models.ghost_batch_norm import GhostBatchNorm2d
from benchmarks import record

# Batch, channels, side: CIFAR's first stage, ImageNet's stages 1 and 3 of ResNet-50.
SHAPES = ((128, 64, 32), (64, 256, 56), (64, 1024, 14))
GHOST_SIZE = 32
ROUNDS = 41
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}


class Loop(nn.BatchNorm2d):
    """What most codes do: batch norm on each chunk of the batch, one after another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(Loop, self).forward(part) for part in x.chunk(len(x) // GHOST_SIZE)])


def make_step(norm: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
    """Forward and backward of one layer."""

    def step() -> None:
        x.grad = None
        norm(x).backward(gradient)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    return step


def seconds_of(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """The steps in turns, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(ROUNDS + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


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
            steps = {
                name: make_step(norm.to(device), x.clone().requires_grad_(), gradient)
                for name, norm in norms.items()
            }
            seconds = seconds_of(steps)
            plain_s = statistics.median(seconds["plain"])
            rows += [
                {
                    "shape": f"{batch}x{channels}x{side}x{side}",
                    "layout": layout,
                    "norm": name,
                    "device": device.type,
                    "threads": torch.get_num_threads(),
                    "median_s": statistics.median(taken),
                    "min_s": min(taken),
                    "times_plain": statistics.median(taken) / plain_s,
                }
                for name, taken in seconds.items()
            ]
    record.show(rows)
    print(record.write("ghost_batch_norm", rows, gpu=record.gpu()))


if __name__ == "__main__":
    main()
