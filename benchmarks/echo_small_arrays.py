"""CIFAR-sized arrays: examples per second of EchoLoader against DataLoader and tf.data, side by side.

Every side gives uint8 batches of 128 after zero padding, random crop and flip. The sides take turns in short
rounds of one process, so that another load on the machine falls on all of them; a ratio is the median over
the rounds. DataLoader has 2 workers and torchvision v2 on tensors, which is faster than on PIL images. By
hand is index arithmetic on whole batches in the loop's own thread, as one would write it, without a state.
tf.data runs the paper's own snippet for the echo (section 2). EchoLoader works in one background thread.

Batch echo can't come out above the ratio without echo. At a factor of 2 it makes half of its batches anew, so
that its rate is at most twice the rate without echo, and tf.data reaches that twice: it gives the memory of a
batch again, as arrays that can't be written into. What an EchoLoader gives is the consumer's to change, and a
repeat is a copy. The record says how long the copy of a batch takes, and in the row "batch, copies free" what
would come of twice the rate without echo. Processor time per batch stands in ``loader_against``'s record.
Other work on the machine slows the sides that use all cores more: measure on an idle one.

    pip install tensorflow-cpu    # optional, also in another environment: --peers-python path/to/python
    python -m benchmarks.echo_small_arrays
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch

from benchmarks import record
from benchmarks.peers import echo_small_arrays_loader
from benchmarks.peers.echo_small_data import BATCH_SIZE, PADDING, copy_us, images, rate
from benchmarks.peers.process import Peer

VARIANTS = {
    "none": 1,
    "example_before_augmentation": 2,
    "example_after_augmentation": 2,
    "batch": 2,
}
Batches = Iterator[Any]


class Transformed(torch.utils.data.Dataset[Any]):
    """As a torchvision user would write it."""

    def __init__(self, source: dict[str, Any]) -> None:
        from torchvision.transforms import v2

        self.images = torch.from_numpy(source["image"]).permute(0, 3, 1, 2).contiguous()
        self.labels = torch.from_numpy(source["label"])
        self.transform = v2.Compose([v2.RandomCrop(32, padding=PADDING), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Any:
        return self.transform(self.images[row]), self.labels[row]


def data_loader(source: dict[str, Any]) -> Batches:
    loader = torch.utils.data.DataLoader(
        Transformed(source), batch_size=BATCH_SIZE, shuffle=True, num_workers=2, drop_last=True
    )
    while True:
        yield from loader


def by_hand(source: dict[str, Any]) -> Batches:
    rng, (images, labels) = np.random.default_rng(0), (source["image"], source["label"])
    number, side = len(images), images.shape[1]
    while True:
        order = rng.permutation(number)
        for begin in range(0, number - BATCH_SIZE + 1, BATCH_SIZE):
            rows = order[begin : begin + BATCH_SIZE]
            padded = np.pad(images[rows], ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
            top, left = rng.integers(0, 2 * PADDING + 1, (2, BATCH_SIZE, 1))
            y, x = top + np.arange(side), left + np.arange(side)
            flip = rng.random(BATCH_SIZE) < 0.5
            x[flip] = x[flip, ::-1]
            cropped = padded[np.arange(BATCH_SIZE)[:, None, None], y[:, :, None], x[:, None, :]]
            yield {"image": torch.from_numpy(cropped), "label": torch.from_numpy(labels[rows])}


def row(echo: str, factor: int, ours: list[float], peers: dict[str, list[float]]) -> Any:
    """Medians over the rounds."""
    found: dict[str, Any] = {"echo": echo, "factor": factor, "examples_per_s": statistics.median(ours)}
    for peer, theirs in peers.items():
        found[f"{peer}_examples_per_s"] = statistics.median(theirs) if theirs else "absent"
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)] if theirs else []
        found[f"ratio_to_{peer}"] = statistics.median(ratios) if ratios else "absent"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--peers-python", default=sys.executable, help="a Python that has tensorflow-cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    source = images(50_000)
    # Workers of DataLoader are forked first, before other libraries have threads.
    iterators: dict[tuple[str, str], Batches] = {("DataLoader", "none"): data_loader(source)}
    next(iterators["DataLoader", "none"])
    iterators["by hand", "none"] = by_hand(source)
    for echo, factor in VARIANTS.items():
        iterators["EchoLoader", echo] = echo_small_arrays_loader.batches(source, echo, factor)
    tf_data = Peer(arguments.peers_python, "benchmarks.peers.echo_tf_data")
    rates: dict[tuple[str, str], list[float]] = {}
    copies_us = []
    for _ in range(arguments.rounds):
        copies_us.append(copy_us(source))
        for side, batches in iterators.items():
            rates.setdefault(side, []).append(rate(batches, arguments.seconds))
        for echo, factor in VARIANTS.items() if tf_data.found else ():
            rates.setdefault(("tf.data", echo), []).append(tf_data.rate(echo, factor, arguments.seconds))
    tf_data.close()
    ours = {echo: rates["EchoLoader", echo] for echo in VARIANTS}
    plain = {peer: rates[peer, "none"] for peer in ("DataLoader", "by hand")}
    peers = {echo: {**plain, "tf.data": rates.get(("tf.data", echo), [])} for echo in VARIANTS}
    rows = [row(echo, factor, ours[echo], peers[echo]) for echo, factor in VARIANTS.items()]
    doubled = [VARIANTS["batch"] * one for one in ours["none"]]
    rows.append(row("batch, copies free", VARIANTS["batch"], doubled, peers["batch"]))
    record.show(rows)
    packages = ("torch", "torchvision", "numpy", "opencv-python-headless")
    record.write(
        "echo_small_arrays", rows, packages=packages,
        tensorflow=tf_data.version, copy_us_per_batch=statistics.median(copies_us),
    )  # fmt: skip


if __name__ == "__main__":
    main()
