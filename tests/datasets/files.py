"""Writers of small data files for tests."""

import io
import json
import pickle
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet

SIZES = [(48, 64), (64, 48), (40, 40), (30, 90), (61, 47)]
CLASSES = ("class0", "class1", "class2")
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
MODULES = (
    "abc.py", "bisect.py", "calendar.py", "cmd.py", "copy.py", "csv.py", "heapq.py", "queue.py", "shlex.py",
)  # fmt: skip


def picture(row: int, height: int = 0, width: int = 0) -> NDArray[np.uint8]:
    """A gradient with noise."""
    if not height:
        height, width = SIZES[row % len(SIZES)]
    rng = np.random.default_rng(row)
    ramp = np.add.outer(np.linspace(0, 150, height), np.linspace(0, 60, width))[..., None]
    return np.clip(ramp + rng.integers(0, 46, (height, width, 3)), 0, 255).astype(np.uint8)


def random_images(number: int, seed: int = 0, side: int = 32) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (number, side, side, 3), dtype=np.uint8)


def encode(image: Image.Image | NDArray[Any], kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


def encoded(row: int, kind: str = "JPEG") -> bytes:
    return encode(picture(row), kind)


def make_parent(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def write_images(
    file: Path, images: list[Any], labels: list[Any], column: str = "image", names: tuple[str, ...] = ()
) -> Path:
    """Parquet in the hub's schema, with the names of the classes if there are any."""
    rows = [{"bytes": image, "path": f"{row}.png"} for row, image in enumerate(images)]
    features = {column: {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()} if names else None
    table = pa.table({column: rows, "label": labels}).replace_schema_metadata(about)
    parquet.write_table(table, make_parent(file))
    return file


def write_cifar10(folder: Path, images: NDArray[np.uint8], labels: list[int], tests: int = 0) -> Path:
    """Parquet of training images, and of the last ``tests`` as test images."""
    training = len(images) - tests
    for split, rows in (("train", slice(training)), ("test", slice(training, None))):
        if len(images[rows]):
            file = folder / f"{split}-00000-of-00001.parquet"
            write_images(file, [encode(image) for image in images[rows]], list(labels[rows]), "img")
    return folder


def write_pickles(folder: Path, images: NDArray[np.uint8], labels: list[int], tests: int) -> Path:
    """The batches of CIFAR-10's archive, the last ``tests`` images in the test batch."""
    folder.mkdir(parents=True, exist_ok=True)
    training = len(images) - tests
    cuts = [batch * training // 5 for batch in range(6)]
    rows = {f"data_batch_{batch}": slice(cuts[batch - 1], cuts[batch]) for batch in range(1, 6)}
    for name, part in {**rows, "test_batch": slice(training, None)}.items():
        planes = images[part].transpose(0, 3, 1, 2).reshape(len(images[part]), -1).copy()
        (folder / name).write_bytes(pickle.dumps({"labels": labels[part], "data": planes}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    return folder


def write_folders(top: Path, splits: dict[str, range]) -> None:
    """Class folders of JPEGs."""
    for split, rows in splits.items():
        for row in rows:
            make_parent(top / split / f"class{row % 3}" / f"{row:03}.jpg").write_bytes(encoded(row))


def write_tar(file: Path, members: list[tuple[str, bytes]], **options: Any) -> None:
    with tarfile.open(make_parent(file), "w", **options) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_labeled(layout: str, top: Path) -> None:
    """Nine training and three validation images of three classes as parquet, folders or tar."""
    if layout == "folders":
        write_folders(top, {"train": range(9), "val": range(9, 12)})
        return
    for number, (split, rows) in enumerate(
        (("train", range(5)), ("train", range(5, 9)), ("val", range(9, 12)))
    ):
        if layout == "parquet":
            name = "validation-00000-of-00001" if split == "val" else f"train-0000{number}-of-00002"
            images, labels = [encoded(row) for row in rows], [row % 3 for row in rows]
            write_images(top / "data" / f"{name}.parquet", images, labels, names=CLASSES)
        else:
            pairs = [(("jpg", encoded(row)), ("cls", b"%d" % (row % 3))) for row in rows]
            members = [(f"{row:03}.{e}", c) for row, pair in zip(rows, pairs, strict=True) for e, c in pair]
            write_tar(top / f"{split}-{number % 2}.tar", members)


def coco(number: int, *, first: int = 0) -> dict[str, Any]:
    """COCO annotations with one box per image, of the categories 5 ("cat") and 2 ("dog") in turn."""
    images, annotations = [], []
    for row in range(first, first + number):
        height, width = picture(row).shape[:2]
        images.append({"id": row, "file_name": f"{row}.jpg", "height": height, "width": width})
        box = {"bbox": [3, 4, 20, 15], "area": 250, "iscrowd": 0}
        annotations.append({"id": 100 + row, "image_id": row, "category_id": (5, 2)[row % 2], **box})
    categories = [{"id": 5, "name": "cat"}, {"id": 2, "name": "dog"}]
    return {"images": images, "annotations": annotations, "categories": categories}


def write_coco(
    top: Path, split: str, listed: dict[str, Any], *, annotations: str = "annotations/instances_{}2017.json"
) -> Path:
    """The annotation file, which is returned, and the images in ``<split>2017``."""
    file = make_parent(top / annotations.format(split))
    file.write_text(json.dumps(listed))
    for image in listed["images"]:
        make_parent(top / f"{split}2017" / image["file_name"]).write_bytes(encoded(image["id"]))
    return file


def texts() -> list[str]:
    """Modules of this Python's standard library."""
    return [(LIBRARY / name).read_text(encoding="utf-8") for name in MODULES]


def lines() -> list[str]:
    return [line.strip() for text in texts() for line in text.splitlines() if line.strip()]


def write_texts(folder: Path) -> Path:
    for name, text in zip(MODULES, texts(), strict=True):
        make_parent(folder / name).write_text(text)
    return folder


def write_json_lines(file: Path, rows: list[Any]) -> Path:
    make_parent(file).write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return file


def write_text_table(path: Path, values: list[Any], column: str = "text") -> Path:
    parquet.write_table(pa.table({column: values}), make_parent(path))
    return path


class Jpegs:
    """Map-style; some rows are truncated."""

    thread_safe = True

    def __init__(self, length: int, damaged: tuple[int, ...] = ()) -> None:
        self._length, self._damaged = length, damaged

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> dict[str, Any]:
        content = encoded(row)
        return {"image": content[: len(content) // 2] if row in self._damaged else content, "label": row}
