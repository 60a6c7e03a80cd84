"""Files of others that would ask for more memory than there is, or count less than no rows."""

import gzip
import io
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from adaecho import EchoLoader
from adaecho.datasets import documents, fingerprint
from adaecho.datasets.cifar10 import ParquetFolder
from adaecho.datasets.documents import find_documents
from adaecho.datasets.fingerprint import fingerprint_of
from adaecho.datasets.labelled_images import find_images
from adaecho.datasets.parquet import values
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import DataError
from tests.datasets.test_labelled_images import labelled
from tests.transforms.pictures import encoded


def read_all(path: Path, *, lines: bool = False) -> list[Any]:
    files = find_documents(str(path), lines=lines)
    return [text for file in files.parts["train"] for _, text in files.read(file)]


@pytest.fixture
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a document: a thousand bytes."""
    monkeypatch.setattr(documents, "MOST_BYTES", 1000)


@contextmanager
def arrow_takes_less_than(most: int) -> Iterator[None]:
    before = pyarrow.default_memory_pool().bytes_allocated()
    yield
    assert pyarrow.default_memory_pool().bytes_allocated() - before < most


@pytest.mark.usefixtures("_limit")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_a_line_has_a_limit_also_behind_gzip(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    short = json.dumps({"text": "short"}) if "jsonl" in name else "short"
    content = f"{short}\n{short}\n".encode() + b"x" * 30_000_000
    file.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"{name}, line 3: a document of more than 1,000 bytes"):
        read_all(file, lines=True)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


@pytest.mark.usefixtures("_limit")
def test_documents_that_are_whole_files_or_rows_have_it_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x\n" * 501)
    with pytest.raises(
        DataError, match=r"a\.txt: is one document of more than 1,000 bytes; task\.lines=true"
    ):
        read_all(tmp_path)
    read_all(tmp_path, lines=True)
    write_bomb(tmp_path / "rows" / "a.parquet", "text", [b"short", b"x" * 1001], [0, 1, 0])
    first, large, last = read_all(tmp_path / "rows")
    assert (first, last) == ("short", "short")
    assert "more than 1,000 bytes; split it" in str(large)


@pytest.mark.parametrize("damage", ["cut", "flipped", "plain", "empty"])
def test_a_damaged_gzip_is_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "a.jsonl.gz"
    content = gzip.compress(b'{"text": "a b c"}\n' * 9999)
    flipped = content[:40] + bytes([content[40] ^ 255]) + content[41:]
    plain = b'{"text": "x"}\n'
    file.write_bytes({"cut": content[:-20], "flipped": flipped, "plain": plain, "empty": b""}[damage])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz(, after line \d+)?: can't be unpacked"):
        read_all(file)


def test_lines_end_where_they_did(tmp_path: Path) -> None:
    content = b"a\r\nb\rc\n\nd\x0be\n\r\nf"
    (tmp_path / "a.txt").write_bytes(content)
    assert read_all(tmp_path, lines=True) == [part.decode() for part in content.splitlines()]


def test_a_footer_that_counts_less_than_no_rows_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train-0.parquet"
    columns = {"image": [{"bytes": b"x", "path": ""}] * 1000, "label": [0, 1] * 500, "text": ["x"] * 1000}
    parquet.write_table(pyarrow.table(columns), file)
    # Whole numbers in Thrift's compact protocol: zigzag, seven bits a byte.
    file.write_bytes(file.read_bytes().replace(b"\xd0\x0f", b"\xcf\x0f"))
    assert parquet.read_metadata(file).num_rows == -1000
    for read in READERS.values():
        with pytest.raises(DataError, match=r"train-0\.parquet: not readable as parquet"):
            read(tmp_path)


READERS: dict[str, Callable[[Path], Any]] = {
    "labelled": lambda folder: labelled(folder).source[0],
    "images": lambda folder: next(iter(find_images(str(folder)))),
    "text": read_all,
}


def write_bomb(file: Path, column: str, values: list[bytes], rows: list[int]) -> None:
    """Some large values and which of them each row is: unpacked some ten gigabytes."""
    file.parent.mkdir(exist_ok=True)
    large = pyarrow.DictionaryArray.from_arrays(pyarrow.array(rows, pyarrow.int32()), pyarrow.array(values))
    if column == "text":
        large = pyarrow.DictionaryArray.from_arrays(large.indices, large.dictionary.cast(pyarrow.string()))
    else:
        path = pyarrow.nulls(len(rows), pyarrow.string())
        large = pyarrow.StructArray.from_arrays([large, path], ["bytes", "path"])
    table = pyarrow.table({column: large, "label": [0] * len(rows)})
    options = {"compression": "zstd", "store_schema": False, "dictionary_pagesize_limit": 1 << 30}
    parquet.write_table(table, file, **options)
    assert file.stat().st_size < 50_000


@pytest.mark.parametrize("reader", ["labelled", "cifar10"])
def test_what_is_kept_of_a_bomb_of_parquet_has_a_limit(tmp_path: Path, reader: str) -> None:
    column = {"cifar10": "img"}.get(reader, "image")
    write_bomb(tmp_path / "train-0.parquet", column, [b"x" * 30_000_000], [0] * 1000)
    read = READERS.get(reader) or (
        lambda folder: ParquetFolder(folder).read("train", lambda _: {}, SkippedExamples(0))
    )
    message = rf"0\.parquet: .*its column '{column}' unpacks to more than 268,435"
    with arrow_takes_less_than(400_000_000), pytest.raises(DataError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("column", ["image", "text"])
def test_what_is_read_of_a_bomb_of_parquet_comes_in_few_rows(tmp_path: Path, column: str) -> None:
    file = tmp_path / "train-0.parquet"
    write_bomb(file, column, [b"x" * 30_000_000], [0] * 1000)
    with arrow_takes_less_than(200_000_000), parquet.ParquetFile(file) as table:
        rows = values(table, file, column)
        assert [len(next(rows)) for _ in range(9)] == [2] * 9


@pytest.mark.parametrize("reader", READERS)
def test_what_a_footer_says_of_a_bomb_is_enough(tmp_path: Path, reader: str) -> None:
    column = "text" if reader == "text" else "image"
    write_bomb(tmp_path / "train-0.parquet", column, [b"x" * 300_000_000], [0])
    message = r"row group 0 of its column '.*' unpacks to more than 268,435,456"
    with arrow_takes_less_than(100_000_000), pytest.raises(DataError, match=message):
        READERS[reader](tmp_path)


def test_a_footer_that_counts_more_rows_than_bytes_is_refused(tmp_path: Path) -> None:
    """Labels in runs take next to nothing, and eight bytes each in memory."""
    write_bomb(tmp_path / "train-0.parquet", "image", [b"x"], [0] * 1_000_000)
    with pytest.raises(DataError, match=r"not readable as parquet \(it counts 1000000 rows\)"):
        labelled(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["train-0.parquet", "a.txt"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str, reader: str) -> None:
    os.mkfifo(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError):
            READERS[reader](path)


def test_an_image_of_holes_is_a_bad_example(tmp_path: Path) -> None:
    for name in ("a/0.jpg", "b/1.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(encoded(0))
    os.truncate(tmp_path / "a/0.jpg", 1 << 40)
    with EchoLoader(labelled(tmp_path).source, 1, max_bad_examples=1, epochs=1) as loader:
        assert [batch["label"].tolist() for batch in loader] == [[1]]
        assert "its 1,099,511,627,776 bytes are no image's" in loader.bad_examples[0]["error"]


def test_names_may_be_no_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [os.fsencode(tmp_path) + b"/%d\xff.txt" % number for number in range(3)]
    for name in names:
        Path(os.fsdecode(name)).write_text("some text")
    files = find_documents(str(tmp_path))
    assert len(files.all()) == 3
    digests = {files.sha256(), files.key(), *fingerprint_of(files.all()).values()}
    monkeypatch.setattr(fingerprint, "_NAMED", 1)
    assert digests.isdisjoint(fingerprint_of(files.all()).values())


def test_row_groups_that_share_one_column_are_refused(tmp_path: Path) -> None:
    """Two hundred kilobytes could mean a billion labels: the footer counts few rows, its groups many."""
    rows, groups = 2000, 3
    table = pyarrow.table({"image": pyarrow.array([b"x"] * rows), "label": [0] * rows})
    whole = io.BytesIO()
    parquet.write_table(table, whole, compression="zstd")
    about, one = (parquet.read_metadata(whole) for _ in range(2))
    for _ in range(groups - 1):
        about.append_row_groups(one)
    footer = io.BytesIO()
    about.write_metadata_file(footer)

    def numbered(count: int) -> bytes:  # Thrift's field 3, an i64: zigzag, seven bits a byte
        return bytes([0x16, 2 * count & 127 | 128, 2 * count >> 7])

    assert numbered(rows * groups) in footer.getvalue()
    end = footer.getvalue()[4:].replace(numbered(rows * groups), numbered(rows), 1)
    length = int.from_bytes(whole.getvalue()[-8:-4], "little")
    file = tmp_path / "train-0.parquet"
    file.write_bytes(whole.getvalue()[: -8 - length] + bytes(rows) + end)
    with pytest.raises(DataError, match=r"it counts 2000 rows, and 6000 in its row groups"):
        labelled(tmp_path)
