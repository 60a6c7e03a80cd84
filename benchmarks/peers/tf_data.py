"""Measure the speed of tf.data for the benchmarks ``echo_jpeg.py`` and ``echo_small_arrays.py``.

TensorFlow and torch cannot share a process, so the benchmarks start this script in a separate process:

    python -m benchmarks.peers.tf_data jpegs FOLDER           # a folder of JPEGs
    python -m benchmarks.peers.tf_data small VARIANT FACTOR   # small images that are used FACTOR times each

For JPEGs, tf.data decodes only the random crop, and resizes it by linear interpolation. Its default decoder
is less accurate than others, because it uses a fast DCT. For small images, VARIANT chooses what is repeated,
as in the data echoing paper: examples before or after augmentation, or whole batches.
"""

import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks.peers import sides


def small_images(echo: str, factor: str) -> Any:
    """Return a dataset of small images with random crop and flip, and with the given echoing."""

    def augment(image: Any, label: Any) -> Any:
        padded = tf.pad(image, [[sides.PADDING] * 2, [sides.PADDING] * 2, [0, 0]])
        return tf.image.random_flip_left_right(tf.image.random_crop(padded, [32, 32, 3])), label

    def echoed(dataset: Any) -> Any:
        return dataset.flat_map(lambda *t: tf.data.Dataset.from_tensors(t).repeat(int(factor)))

    source = sides.images(50_000)
    dataset = tf.data.Dataset.from_tensor_slices((source["image"], source["label"])).repeat()
    if echo == "example_before_augmentation":
        dataset = echoed(dataset)
    if echo == "example_after_augmentation":
        dataset = echoed(dataset.map(augment, tf.data.AUTOTUNE)).shuffle(sides.SMALL_BUFFER)
    else:
        dataset = dataset.shuffle(sides.SMALL_BUFFER).map(augment, tf.data.AUTOTUNE)
    dataset = dataset.batch(sides.SMALL.batch_size, drop_remainder=True)
    return echoed(dataset) if echo == "batch" else dataset


def augment_jpeg(content: Any) -> Any:
    """Decode one JPEG, and apply a random resized crop, a flip and a color jitter."""
    corner, size, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(content), tf.zeros([1, 0, 4]), area_range=sides.SCALE,
        aspect_ratio_range=sides.RATIO, max_attempts=10, use_image_if_no_bounding_boxes=True,
    )  # fmt: skip
    image = tf.image.decode_and_crop_jpeg(content, tf.concat([corner[:2], size[:2]], 0), channels=3)
    image = tf.image.random_flip_left_right(tf.image.resize(image, [sides.SIZE] * 2))
    brightness, contrast, saturation = tf.unstack(tf.random.uniform([3], 1 - sides.JITTER, 1 + sides.JITTER))
    gray = tf.constant([0.299, 0.587, 0.114])
    mean = tf.tensordot(tf.reduce_mean(image, [0, 1]), gray, 1)
    matrix = brightness * contrast * (saturation * tf.eye(3) + (1 - saturation) * gray[:, None])
    image = tf.matmul(tf.reshape(image, [-1, 3]), matrix) + brightness * (1 - contrast) * mean
    return tf.cast(tf.clip_by_value(tf.reshape(image, [sides.SIZE, sides.SIZE, 3]), 0, 255), tf.uint8)


def jpegs(folder: str) -> Any:
    """Return a dataset of batches of augmented photographs."""
    dataset = tf.data.Dataset.from_tensor_slices(sides.read_jpegs(Path(folder)))
    dataset = dataset.repeat().shuffle(sides.JPEG_BUFFER).map(augment_jpeg, tf.data.AUTOTUNE)
    return dataset.batch(sides.JPEGS.batch_size, drop_remainder=True)


def main() -> None:
    make, kind = {"jpegs": (jpegs, sides.JPEGS), "small": (small_images, sides.SMALL)}[sys.argv[1]]
    sides.serve(iter(make(*sys.argv[2:]).prefetch(2).as_numpy_iterator()), tf.__version__, kind)


if __name__ == "__main__":
    main()
