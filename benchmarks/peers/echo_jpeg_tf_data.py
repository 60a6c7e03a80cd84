"""tf.data's side of ``echo_jpeg``, in a process of its own: decoding only the crop, linear resizing.

    python -m benchmarks.peers.echo_jpeg_tf_data <folder>

Reads lines "<seconds>" and answers each with two rates. TensorFlow's default decoder uses the fast,
less accurate DCT.
"""

import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks.peers.echo_jpegs import (
    BATCH_SIZE,
    JITTER,
    RATIO,
    SCALE,
    SHUFFLE_BUFFER,
    SIZE,
    read_images,
    serve,
)


def augment(content: Any) -> Any:
    """Random resized crop as in TensorFlow's ImageNet examples, flip, and the jitter as one affine map."""
    corner, size, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(content), tf.zeros([1, 0, 4]), area_range=SCALE,
        aspect_ratio_range=RATIO, max_attempts=10, use_image_if_no_bounding_boxes=True,
    )  # fmt: skip
    image = tf.image.decode_and_crop_jpeg(content, tf.concat([corner[:2], size[:2]], 0), channels=3)
    image = tf.image.random_flip_left_right(tf.image.resize(image, [SIZE, SIZE]))
    brightness, contrast, saturation = tf.unstack(tf.random.uniform([3], 1 - JITTER, 1 + JITTER))
    grey = tf.constant([0.299, 0.587, 0.114])
    mean = tf.tensordot(tf.reduce_mean(image, [0, 1]), grey, 1)
    matrix = brightness * contrast * (saturation * tf.eye(3) + (1 - saturation) * grey[:, None])
    image = tf.matmul(tf.reshape(image, [-1, 3]), matrix) + brightness * (1 - contrast) * mean
    return tf.cast(tf.clip_by_value(tf.reshape(image, [SIZE, SIZE, 3]), 0, 255), tf.uint8)


def main() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(read_images(Path(sys.argv[1])))
    dataset = dataset.repeat().shuffle(SHUFFLE_BUFFER).map(augment, tf.data.AUTOTUNE)
    batches = iter(dataset.batch(BATCH_SIZE, drop_remainder=True).prefetch(2).as_numpy_iterator())
    next(batches)
    serve(batches, tf.__version__)


if __name__ == "__main__":
    main()
