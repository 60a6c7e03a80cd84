"""Compare the speed of training with EchoLoader to the speed of training without loading any data.

Without loading, all steps use the same batch, which stays on the device. This speed is the upper limit.
EchoLoader runs without echo, and with batch echo, which uses each batch twice. The model is ResNet-32.
Batches have 128 images of CIFAR-10's shape, with padding, crop and flip.

Without a GPU, training and EchoLoader use one CPU thread each. The record includes a profile of the steps
without echo.

Run: python -m benchmarks.resident_rate
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from adaecho import EchoLoader
from adaecho.models.images import Normalize, cifar_resnet
from adaecho.transforms.small_images import PadCropFlip
from benchmarks import record
from benchmarks.peers import sides

BATCH_SIZE = 128
STEPS = {"cuda": 100, "cpu": 3}  # number of steps per turn
TURNS = 11  # number of turns; the first one is not counted


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any], steps: int) -> float:
    """Train for a number of steps, and return the steps per second."""
    start = time.perf_counter()
    for batch in itertools.islice(batches, steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
        optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return steps / (time.perf_counter() - start)


def profile(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any], steps: int) -> Any:
    """Return the 12 operations that take the longest per step, on the GPU if there is one."""
    with torch.profiler.profile() as profiled:
        train(model, optimizer, batches, steps)
    time_us = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    longest = sorted(profiled.key_averages(), key=lambda one: -getattr(one, time_us))[:12]
    return [
        {
            "operation": one.key,
            "ms": getattr(one, time_us) / 1000 / steps,
            "calls": one.count / steps,
        }
        for one in longest
    ]


def main() -> None:
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(Normalize((125.0,) * 3, (64.0,) * 3, channels_last=True), cifar_resnet()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    source = sides.images(50_000)
    loaders = {
        echo: EchoLoader(
            source, BATCH_SIZE, echo=echo, factor=factor, shuffle_buffer=10_000,
            augment=PadCropFlip(4, flip=True), num_workers=1, device=device,
        )
        for echo, factor in (("none", 1), ("batch", 2))
    }  # fmt: skip
    running: dict[str, Iterator[Any]] = {echo: iter(loader) for echo, loader in loaders.items()}
    running["resident batch"] = itertools.repeat(next(running["none"]))
    turns = {
        side: partial(train, model, optimizer, batches, STEPS[device]) for side, batches in running.items()
    }
    rates = {side: found[1:] for side, found in sides.take_turns(turns, TURNS).items()}
    resident = rates["resident batch"]
    rows = [
        {
            "echo": side,
            "device": record.gpu() or "cpu, 1 thread",
            "steps_per_s": statistics.median(rates[side]),
            "resident_steps_per_s": statistics.median(resident),
            "ratio_to_resident": sides.ratio(rates[side], resident),
        }
        for side in loaders
    ]
    found = profile(model, optimizer, running["none"], STEPS[device])
    for loader in loaders.values():
        loader.close()
    record.write("resident_rate", rows, gpu=record.gpu(), profile_of_a_step=found)


if __name__ == "__main__":
    main()
