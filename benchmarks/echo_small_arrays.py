"""CIFAR-sized arrays: examples per second of EchoLoader against DataLoader and tf.data, side by side.

Every side gives uint8 batches of 128 after zero padding, random crop and flip. The sides take turns in short
rounds of one process, so that another load on the machine falls on all of them; a ratio is the median over
the rounds. DataLoader has 2 workers and torchvision v2 on tensors, which is faster than on PIL images.
tf.data runs the paper's own snippet for the echo (section 2). EchoLoader works in one background thread.

    pip install tensorflow-cpu    # optional: without it that side is left out, and the record says so
    python -m benchmarks.echo_small_arrays
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import cv2
import numpy as np
import torch

from adaecho import EchoLoader
from adaecho.tasks.images import PadCropFlip
from benchmarks import record

BATCH_SIZE, SHUFFLE_BUFFER, PADDING = 128, 10_000, 4
VARIANTS = {
    "none": 1,
    "example_before_augmentation": 2,
    "example_after_augmentation": 2,
    "batch": 2,
}
Batches = Iterator[Any]


def images(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8),
        "label": rng.integers(0, 10, number),
    }


def echo_loader(source: dict[str, Any], echo: str, factor: int) -> Batches:
    return iter(
        EchoLoader(
            source, BATCH_SIZE, echo=echo, factor=factor, shuffle_buffer=SHUFFLE_BUFFER,
            augment=PadCropFlip(PADDING, flip=True), num_workers=1,
        )
    )  # fmt: skip


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


def tf_data(source: dict[str, Any], echo: str, factor: int) -> Batches:
    import tensorflow as tf

    def augment(image: Any, label: Any) -> Any:
        padded = tf.pad(image, [[PADDING, PADDING], [PADDING, PADDING], [0, 0]])
        return tf.image.random_flip_left_right(tf.image.random_crop(padded, [32, 32, 3])), label

    def echoed(dataset: Any) -> Any:
        return dataset.flat_map(lambda *t: tf.data.Dataset.from_tensors(t).repeat(factor))

    dataset = tf.data.Dataset.from_tensor_slices((source["image"], source["label"])).repeat()
    if echo == "example_before_augmentation":
        dataset = echoed(dataset).shuffle(SHUFFLE_BUFFER).map(augment, tf.data.AUTOTUNE)
    elif echo == "example_after_augmentation":
        dataset = echoed(dataset.map(augment, tf.data.AUTOTUNE)).shuffle(SHUFFLE_BUFFER)
    else:
        dataset = dataset.shuffle(SHUFFLE_BUFFER).map(augment, tf.data.AUTOTUNE)
    dataset = dataset.batch(BATCH_SIZE, drop_remainder=True)
    if echo == "batch":
        dataset = echoed(dataset)
    return iter(dataset.prefetch(2).as_numpy_iterator())


def rate(batches: Batches, seconds: float) -> float:
    """Examples per second, after a moment in which queues that filled meanwhile are emptied."""
    for _ in range(24):
        next(batches)
    start, number = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        next(batches)
        number += 1
    return number * BATCH_SIZE / (time.perf_counter() - start)


def sides(source: dict[str, Any]) -> dict[tuple[str, str], Callable[[], Batches]]:
    # Workers of DataLoader are forked first, before other libraries have threads.
    made: dict[tuple[str, str], Callable[[], Batches]] = {("DataLoader", "none"): lambda: data_loader(source)}
    for echo, factor in VARIANTS.items():
        made["EchoLoader", echo] = lambda e=echo, f=factor: echo_loader(source, e, f)  # type: ignore[misc]
    try:
        import tensorflow as tf
    except ImportError:
        print("tensorflow is absent: that side is left out")
        return made
    tf.config.set_visible_devices([], "GPU")
    for echo, factor in VARIANTS.items():
        made["tf.data", echo] = lambda e=echo, f=factor: tf_data(source, e, f)  # type: ignore[misc]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    iterators: dict[tuple[str, str], Batches] = {}
    for side, make in sides(images(50_000)).items():
        iterators[side] = make()
        next(iterators[side])
    rates: dict[tuple[str, str], list[float]] = {side: [] for side in iterators}
    for _ in range(arguments.rounds):
        for side, batches in iterators.items():
            rates[side].append(rate(batches, arguments.seconds))
    rows = []
    for echo, factor in VARIANTS.items():
        ours = rates["EchoLoader", echo]
        row: dict[str, Any] = {"echo": echo, "factor": factor, "examples_per_s": statistics.median(ours)}
        for peer, key in (("DataLoader", (("DataLoader", "none"))), ("tf.data", ("tf.data", echo))):
            theirs = rates.get(key)
            row[f"{peer}_examples_per_s"] = statistics.median(theirs) if theirs else "absent"
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)] if theirs else []
            row[f"ratio_to_{peer}"] = statistics.median(ratios) if ratios else "absent"
        rows.append(row)
    record.show(rows)
    record.write(
        "echo_small_arrays", rows,
        packages=("torch", "torchvision", "numpy", "opencv-python-headless", "tensorflow-cpu"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
