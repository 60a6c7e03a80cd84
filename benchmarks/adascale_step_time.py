"""Compare the step time of AdaScale, and of FairScale's AdaScale if installed, with that of plain SGD.

Each optimizer trains a separate model on synthetic images, and accumulates the same number of gradients.
Every round takes one step with each optimizer, and a ratio compares steps of the same round.

On a CPU, times are CPU seconds of one thread, which depend less on other work than wall time does. On a GPU,
they are wall time, and the steps use fused SGD.

Run: python -m benchmarks.adascale_step_time
"""

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision.models import resnet50

from adaecho import AdaScale
from adaecho.models.images import cifar_resnet
from benchmarks import record

with contextlib.suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fairscale.optim import AdaScale as FairScaleAdaScale

ACCUMULATE = 2
# For each model: a function that builds it, the images per micro-batch, their size, the number of classes,
# and the number of rounds (the first one is not counted).
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int, int, int]] = {
    "ResNet-32, CIFAR-10": (lambda: cifar_resnet(), 64, 32, 10, 61),
    "ResNet-50, 192 pixels": (resnet50, 8, 192, 1000, 21),
}


def optimizers() -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    """Return functions that turn SGD into the optimizers under comparison. Plain SGD is first."""
    ways: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
        "SGD": lambda sgd: sgd,
        "AdaScale": lambda sgd: AdaScale(sgd, num_gradients_to_accumulate=ACCUMULATE),
    }
    if "FairScaleAdaScale" in globals():
        ways["FairScale"] = lambda sgd: FairScaleAdaScale(sgd, num_gradients_to_accumulate=ACCUMULATE)
    return ways


def step_s(model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Time a training step, in CPU seconds, or in wall seconds on a GPU."""
    begin = _now(images.device)
    optimizer.zero_grad()
    for _ in range(ACCUMULATE):
        (nn.functional.cross_entropy(model(images), labels) / ACCUMULATE).backward()
    optimizer.step()
    return _now(images.device) - begin


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(name: str, device: torch.device) -> list[dict[str, Any]]:
    """Measure the steps of all optimizers on one model, and return one row per optimizer."""
    build, batch_size, size, classes, rounds = MODELS[name]
    images = torch.randn(batch_size, 3, size, size, device=device)
    labels = torch.randint(classes, (batch_size,), device=device)
    fused = device.type == "cuda"
    lr = torch.tensor(1e-3, device=device) if fused else 1e-3
    runs, seconds = {}, {}
    for way, wrap in optimizers().items():
        torch.manual_seed(0)
        model = build().to(device)
        runs[way] = (model, wrap(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=fused)))
        seconds[way] = []
    ways = list(runs)
    for turn in range(rounds):
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            seconds[way].append(step_s(*runs[way], images, labels))
    where = torch.cuda.get_device_name() if fused else "cpu, 1 thread"
    return [{**summary(name, way, seconds[way][1:], seconds["SGD"][1:]), "device": where} for way in ways]


def summary(name: str, way: str, seconds: list[float], plain: list[float]) -> dict[str, Any]:
    """Return the median step time, and the median and quartiles of the ratio to plain SGD."""
    ratios = [one / other for one, other in zip(seconds, plain, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "model": name,
        "optimizer": way,
        "step_median_s": statistics.median(seconds),
        "ratio_of_minima": min(seconds) / min(plain),
        "ratio_median": median,
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "rounds": len(ratios),
    }


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [row for name in MODELS for row in measure(name, device)]
    packages = ("torch", "torchvision", "fairscale")
    record.write("adascale_step_time", rows, packages=packages, gpu=record.gpu())


if __name__ == "__main__":
    main()
