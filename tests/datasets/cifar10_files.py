"""Tiny copies of CIFAR-10 in the forms in which it is stored."""

import pickle
import struct
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

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


def write_parquet(file: Path, encoded: list[bytes | None], labels: list[int | None]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": image, "path": f"{row}.png"} for row, image in enumerate(encoded)]
    parquet.write_table(pa.table({"img": rows, "label": labels}, schema=SCHEMA), file)
    return file


class _LikePython2(pickle._Pickler):  # type: ignore[name-defined]
    """Byte strings get the opcode that Python 2 wrote for its ``str``, as in the original files."""

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, bytes: save_string}  # type: ignore[attr-defined]


def write_batch(file: Path, batch: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        _LikePython2(stream, protocol=2).dump(batch)
    return file


def batch_of(images: NDArray[np.uint8], labels: list[int]) -> dict[bytes, Any]:
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1).copy()
    return {b"batch_label": b"training batch", b"labels": labels, b"data": planes, b"filenames": [b"a.png"]}
