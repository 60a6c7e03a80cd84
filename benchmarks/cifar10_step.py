"""Seconds of a step of ResNet-32 at batch 128: do bfloat16, channels_last or torch.compile help here?

Run: python -m benchmarks.cifar10_step [threads]
The variants take turns, so that a change of the machine's speed meets all of them. Compiled on a GPU alone.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from adaecho.models.cifar_resnet import cifar_resnet
from adaecho.models.normalise import Normalise
from adaecho.tasks.cifar10 import MEAN, STD
from adaecho.tasks.images import cross_entropy
from adaecho.training.device import autocast, compile_model
from benchmarks import record

BATCH_SIZE = 128
ROUNDS = 4
STEPS_PER_ROUND = {"cuda": 50, "cpu": 3}
WARM_UP_STEPS = 5
EAGER = [
    ("float32", False, "off"),
    ("float32", True, "off"),
    ("bfloat16", False, "off"),
    ("bfloat16", True, "off"),
]
COMPILED = [("bfloat16", True, "default"), ("bfloat16", True, "reduce-overhead")]


def make_step(precision: str, channels_last: bool, mode: str, device: torch.device) -> Callable[[], None]:
    """One update on a fixed batch of noise, as the training loop does it."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Normalise(MEAN, STD, channels_last=channels_last), cifar_resnet())
    model = model.to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    compile_model(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    batch = {
        "image": torch.randint(0, 256, (BATCH_SIZE, 32, 32, 3), dtype=torch.uint8, device=device),
        "label": torch.randint(0, 10, (BATCH_SIZE,), device=device),
    }

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(device, precision):
            loss, number = cross_entropy(model, batch)
        (loss / number).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def main() -> None:
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    variants = EAGER + COMPILED * (device.type == "cuda")
    steps = {variant: make_step(*variant, device) for variant in variants}
    seconds: dict[tuple[str, bool, str], list[float]] = {variant: [] for variant in steps}
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    for _ in range(ROUNDS):
        for variant, step in steps.items():
            for _ in range(STEPS_PER_ROUND[device.type]):
                begin = time.perf_counter()
                step()
                seconds[variant].append(time.perf_counter() - begin)
    rows = [
        {
            "precision": precision,
            "channels_last": channels_last,
            "compile": mode,
            "device": device.type,
            "threads": threads,
            "median_s_per_step": statistics.median(taken),
            "min_s_per_step": min(taken),
            "max_s_per_step": max(taken),
        }
        for (precision, channels_last, mode), taken in seconds.items()
    ]
    record.show(rows)
    print(record.write("cifar10_step", rows, gpu=record.gpu()))


if __name__ == "__main__":
    main()
