"""tf.data's side of ``echo_small_arrays``, in a process of its own: torch and TensorFlow both bring LLVM.

Reads lines "<variant> <factor> <seconds>" and answers each with examples per second.
"""

import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from benchmarks.peers.echo_small_data import BATCH_SIZE, PADDING, SHUFFLE_BUFFER, images, rate


def batches(source: dict[str, Any], echo: str, factor: int) -> Iterator[Any]:
    """The paper's snippet (section 2) where each variant has it."""

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


def main() -> None:
    source = images(50_000)
    running: dict[str, Iterator[Any]] = {}
    print("ready", tf.__version__, flush=True)
    for line in sys.stdin:
        echo, factor, seconds = line.split()
        if echo not in running:
            running[echo] = batches(source, echo, int(factor))
        print(rate(running[echo], float(seconds)), flush=True)


if __name__ == "__main__":
    main()
