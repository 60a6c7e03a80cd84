"""Encoded images as they lie on a disk: a folder of image files, or parquet with an image column."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adaecho.datasets.parquet import read_schema
from adaecho.errors import DataError

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_COLUMN = "image"
_ROWS = 64  # read from parquet at once


class ImageFiles:
    """Map-style: the bytes of each file, as ``image``."""

    thread_safe = True

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": self.files[row].read_bytes()}

    def origin(self, row: int) -> str:
        """What to call an image in a message."""
        return str(self.files[row])


class ImageTables:
    """Iterable: the bytes in the column ``image`` of parquet files, in stored order."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from pyarrow import parquet

        for file in self.files:
            with parquet.ParquetFile(file) as table:
                for rows in table.iter_batches(batch_size=_ROWS, columns=[_COLUMN]):
                    for image in rows.column(0).to_pylist():
                        yield {"image": image["bytes"] if isinstance(image, dict) else image}


def find_images(path: str) -> ImageFiles | ImageTables:
    """The images under a path.

    Args:
        path: a folder, searched through with all folders inside it, or one file.

    Raises:
        DataError: there are none, or a parquet file has no image column.
    """
    top = Path(path).expanduser()
    if not top.exists():
        raise DataError(f"images={path}: there is no such file or folder")
    found = sorted(top.rglob("*")) if top.is_dir() else [top]
    images = [file for file in found if file.suffix.lower() in IMAGE_ENDINGS]
    if images:
        return ImageFiles(images)
    tables = [file for file in found if file.suffix == ".parquet"]
    if not tables:
        raise DataError(f"images={path}: holds neither images ({', '.join(IMAGE_ENDINGS)}) nor parquet files")
    for file in tables:
        _check_column(file)
    return ImageTables(tables)


def _check_column(file: Path) -> None:
    names = read_schema(file).names
    if _COLUMN not in names:
        raise DataError(f"{file}: needs a column {_COLUMN!r}, and has {', '.join(names)}")
