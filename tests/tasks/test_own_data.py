"""A first try on own data: what a look shows to be wrong is said before a trial begins."""

from pathlib import Path
from typing import Any

import pytest

from adaecho.errors import DataError
from adaecho.tasks.options import ImagenetOptions, TextOptions
from tests.datasets.files import encoded

OF_IMAGES = {"validation_path": None}
OF_TEXT = {"column": "text", "lines": False, "block": 64}


def photographs(folder: Path, number: int = 3) -> None:
    folder.mkdir(parents=True)
    for row in range(number):
        (folder / f"{row}.jpg").write_bytes(encoded(row))


def look(path: Path) -> Any:
    return ImagenetOptions.size_of(str(path), OF_IMAGES, 0)


def test_what_a_look_at_the_images_shows_is_told(tmp_path: Path) -> None:
    for part, names in (("train", ("cat", "dog")), ("val", ("cat", "fox"))):
        for name in names:
            photographs(tmp_path / "two" / part / name)
    with pytest.raises(DataError, match="the training and validation splits have different classes"):
        look(tmp_path / "two")


def test_what_a_look_at_the_text_shows_is_told(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 99)
    assert TextOptions.size_of(str(tmp_path), OF_TEXT, 6).units == 6
