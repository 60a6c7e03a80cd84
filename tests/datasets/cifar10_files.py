"""Tiny copies of CIFAR-10 in the forms in which it is stored."""

import pickle
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet

SCHEMA = pa.schema(
    [("img", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())]
)


def random_images(number: int, seed: int = 0, side: int = 32) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (number, side, side, 3), dtype=np.uint8)


def encode(image: NDArray[np.uint8], form: str = "PNG") -> bytes:
    stream = BytesIO()
    Image.fromarray(image).save(stream, form, **({"lossless": True} if form == "WEBP" else {}))
    return stream.getvalue()


def write_parquet(
    file: Path, encoded: list[bytes | None], labels: list[int | None], about: bytes = b""
) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": image, "path": f"{row}.png"} for row, image in enumerate(encoded)]
    schema = SCHEMA.with_metadata({b"huggingface": about}) if about else SCHEMA
    parquet.write_table(pa.table({"img": rows, "label": labels}, schema=schema), file)
    return file


def write_pickles(folder: Path, images: NDArray[np.uint8], labels: list[int], tests: int) -> Path:
    """Five batches and one of so many tests, with the names of the classes, as torchvision unpickles them."""
    folder.mkdir(parents=True, exist_ok=True)
    training = len(images) - tests
    cuts = [one * training // 5 for one in range(6)]
    rows = {f"data_batch_{one}": slice(cuts[one - 1], cuts[one]) for one in range(1, 6)}
    for name, part in {**rows, "test_batch": slice(training, None)}.items():
        planes = images[part].transpose(0, 3, 1, 2).reshape(len(images[part]), -1).copy()
        (folder / name).write_bytes(pickle.dumps({"labels": labels[part], "data": planes}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    return folder


def write_parts(folder: Path, images: NDArray[np.uint8], labels: list[int], tests: int = 0) -> Path:
    """Parquet of training images, and of so many tests, the last ones."""
    training = len(images) - tests
    for part, rows in (("train", slice(training)), ("test", slice(training, None))):
        if len(images[rows]):
            encoded: list[bytes | None] = [encode(image) for image in images[rows]]
            write_parquet(folder / f"{part}-00000-of-00001.parquet", encoded, list(labels[rows]))
    return folder
