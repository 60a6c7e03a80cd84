"""ResNet-32 fed by EchoLoader against the same steps on one batch that stays on the device.

Batch 128, images of CIFAR-10's shape, pad-crop-flip, without echo and with batch echo at e = 2. It runs on a
GPU if there is one, otherwise on one CPU thread with the loader on another core. The sides alternate, and a
ratio is the median over turns. The record includes a profile of the steps without echo.

Run: python -m benchmarks.resident_rate
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from adaecho import EchoLoader
from adaecho.models.images import Normalise, cifar_resnet
from adaecho.transforms.small_images import PadCropFlip
from benchmarks import record

BATCH_SIZE = 128
STEPS = {"cuda": 100, "cpu": 3}  # per turn
TURNS = 11  # the first turn is not counted


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any], steps: int) -> float:
    """Steps per second."""
    start = time.perf_counter()
    for batch in itertools.islice(batches, steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
        optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return steps / (time.perf_counter() - start)


def profile(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any], steps: int) -> Any:
    """Return the operations that take longest, on the device if there is one, per step."""
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
    rng = np.random.default_rng(0)
    source = {
        "image": rng.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8),
        "label": rng.integers(0, 10, 50_000),
    }
    model = nn.Sequential(Normalise((125.0,) * 3, (64.0,) * 3, channels_last=True), cifar_resnet()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loaders = {
        echo: EchoLoader(
            source, BATCH_SIZE, echo=echo, factor=factor, shuffle_buffer=10_000,
            augment=PadCropFlip(4, flip=True), num_workers=1, device=device,
        )
        for echo, factor in (("none", 1), ("batch", 2))
    }  # fmt: skip
    sides: dict[str, Iterator[Any]] = {echo: iter(loader) for echo, loader in loaders.items()}
    sides["resident batch"] = itertools.repeat(next(sides["none"]))
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(TURNS):
        for side, batches in sides.items():
            rates[side].append(train(model, optimizer, batches, STEPS[device]))
    resident = rates["resident batch"][1:]
    rows = []
    for side in loaders:
        ratios = [one / other for one, other in zip(rates[side][1:], resident, strict=True)]
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu, 1 thread"
        rows.append(
            {
                "echo": side,
                "device": name,
                "steps_per_s": statistics.median(rates[side][1:]),
                "resident_steps_per_s": statistics.median(resident),
                "ratio_to_resident": statistics.median(ratios),
            }
        )
    found = profile(model, optimizer, sides["none"], STEPS[device])
    for loader in loaders.values():
        loader.close()
    record.show(rows)
    record.show(found)
    record.write("resident_rate", rows, gpu=record.gpu(), profile_of_a_step=found)


if __name__ == "__main__":
    main()
