"""Compare EchoLoader with DataLoader and tf.data on CIFAR-sized arrays, in examples per second.

The loaders take turns. Every loader returns uint8 batches of 128 after zero padding, random crop and flip.
EchoLoader and tf.data are also measured with echoing, which uses each example or batch twice. Repeats count
as examples. Run the benchmark on an idle machine.

* EchoLoader uses one background thread.
* DataLoader uses 2 workers, with torchvision v2 on tensors.
* "by hand" is a NumPy loop without background threads. It crops and flips whole batches by indexing.
* tf.data repeats examples with the code in section 2 of the data echoing paper.

If each batch is used twice, the rate is at most twice the rate without echoing. tf.data reaches this limit,
because its repeats share read-only memory. EchoLoader copies each repeat, because the training loop may
change it. The row "batch, copies free" shows the limit for EchoLoader.

    pip install tensorflow-cpu    # optional; in a different environment: --peers-python path/to/python
    python -m benchmarks.echo_small_arrays
"""

import statistics
import sys
import time
from functools import partial
from typing import Any

import cv2
import numpy as np
import torch

from adaecho import EchoLoader
from adaecho.transforms.small_images import PadCropFlip
from benchmarks import record
from benchmarks.peers import sides
from benchmarks.peers.sides import PADDING, Batches

BATCH_SIZE = sides.SMALL.batch_size
VARIANTS = {
    "none": 1,
    "example_before_augmentation": 2,
    "example_after_augmentation": 2,
    "batch": 2,
}


class Transformed(torch.utils.data.Dataset[Any]):
    """A dataset of images with random crop and flip by torchvision."""

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


def echo_loader(source: dict[str, Any], echo: str) -> Batches:
    loader = EchoLoader(
        source, BATCH_SIZE, echo=echo, factor=VARIANTS[echo], shuffle_buffer=sides.SMALL_BUFFER,
        augment=PadCropFlip(PADDING, flip=True), num_workers=1,
    )  # fmt: skip
    return iter(loader)


def copy_us(source: dict[str, Any]) -> float:
    """Return the median CPU time to copy one batch of images, in microseconds."""
    # Each batch is copied once, so it is in no CPU cache. zeros_like has already caused all page faults.
    batches = source["image"][: 128 * BATCH_SIZE].reshape(128, BATCH_SIZE, -1)
    into, spent = np.zeros_like(batches), []
    for batch, copy in zip(batches, into, strict=True):
        start = time.thread_time()
        np.copyto(copy, batch)
        spent.append(time.thread_time() - start)
    return 1e6 * statistics.median(spent)


def row(echo: str, ours: list[float], peers: dict[str, list[float]]) -> dict[str, Any]:
    """Return one row: median rates of EchoLoader and of other loaders, and the median ratios between them."""
    found: dict[str, Any] = {"echo": echo, "factor": VARIANTS[echo.partition(",")[0]]}
    found["examples_per_s"] = statistics.median(ours)
    for peer, theirs in peers.items():
        found[f"{peer}_examples_per_s"] = statistics.median(theirs) if theirs else "absent"
        found[f"ratio_to_{peer}"] = sides.ratio(ours, theirs) if theirs else "absent"
    return found


def main() -> None:
    parser = record.options(__doc__, rounds=10, seconds=0.5)
    parser.add_argument("--peers-python", default=sys.executable, help="Python that has tensorflow-cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    source = sides.images(50_000)
    # Fork the workers of DataLoader first, before other libraries start threads.
    running = {"DataLoader": data_loader(source)}
    next(running["DataLoader"])
    running |= {"by hand": by_hand(source)} | {echo: echo_loader(source, echo) for echo in VARIANTS}
    tf_data = {
        echo: sides.Peer(options.peers_python, "tf_data", "small", echo, str(factor))
        for echo, factor in VARIANTS.items()
    }
    turns: dict[Any, Any] = {
        name: partial(sides.rates, batches, options.seconds, sides.SMALL) for name, batches in running.items()
    }
    turns |= {
        (echo, "tf.data"): partial(peer.rates, options.seconds)
        for echo, peer in tf_data.items()
        if peer.version
    }
    measured = sides.take_turns(turns, options.rounds)
    rates = {name: [one.per_s for one in of_side] for name, of_side in measured.items()}
    plain = {peer: rates[peer] for peer in ("DataLoader", "by hand")}
    peers = {echo: {**plain, "tf.data": rates.get((echo, "tf.data"), [])} for echo in VARIANTS}
    rows = [row(echo, rates[echo], peers[echo]) for echo in VARIANTS]
    doubled = [VARIANTS["batch"] * one for one in rates["none"]]
    rows.append(row("batch, copies free", doubled, peers["batch"]))
    for peer in tf_data.values():
        peer.close()
    packages = ("torch", "torchvision", "numpy", "opencv-python-headless")
    record.write(
        "echo_small_arrays", rows, packages=packages,
        tensorflow=tf_data["none"].version or tf_data["none"].note, copy_us_per_batch=copy_us(source),
    )  # fmt: skip


if __name__ == "__main__":
    main()
