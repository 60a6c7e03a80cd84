"""Files of others that would ask for more memory than there is, or count less than no rows."""

import gzip
import io
import json
import os
import tracemalloc
from collections.abc import Callable
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
from adaecho.datasets.labelled_images import find_images, find_labelled
from adaecho.datasets.parquet import values
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import DataError
from tests.transforms.pictures import encoded


def read_all(path: Path, *, lines: bool = False) -> None:
    files = find_documents(str(path), lines=lines)
    for file in files.parts["train"]:
        list(files.read(file))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_a_line_has_a_limit_also_behind_gzip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(documents, "MOST_BYTES", 1000)
    file = tmp_path / name
    short = json.dumps({"text": "short"}) if "jsonl" in name else "short"
    content = f"{short}\n{short}\n".encode() + b"x" * 30_000_000
    file.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"{name}, line 3: a document of more than 1,000 bytes"):
        read_all(file, lines=True)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_a_file_that_is_one_document_has_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MOST_BYTES", 1000)
    (tmp_path / "a.txt").write_bytes(b"x\n" * 501)
    with pytest.raises(
        DataError, match=r"a\.txt: is one document of more than 1,000 bytes; task\.lines=true"
    ):
        read_all(tmp_path)
    read_all(tmp_path, lines=True)


@pytest.mark.parametrize("damage", ["cut", "flipped", "plain"])
def test_a_damaged_gzip_is_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "a.jsonl.gz"
    content = gzip.compress(b'{"text": "a b c"}\n' * 9999)
    flipped = content[:40] + bytes([content[40] ^ 255]) + content[41:]
    file.write_bytes({"cut": content[:-20], "flipped": flipped, "plain": b'{"text": "x"}\n'}[damage])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz, after line \d+: can't be unpacked"):
        read_all(file)


def test_lines_end_where_they_did(tmp_path: Path) -> None:
    content = b"a\r\nb\rc\n\nd\x0be\n\r\nf"
    (tmp_path / "a.txt").write_bytes(content)
    files = find_documents(str(tmp_path), lines=True)
    texts = [text for _, text in files.read(tmp_path / "a.txt")]
    assert texts == [part.decode() for part in content.splitlines()]


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


def labelled(folder: Path) -> Any:
    found = find_labelled(str(folder), "train")
    assert found is not None
    return found.source[0]


READERS: dict[str, Callable[[Path], Any]] = {
    "labelled": labelled,
    "images": lambda folder: next(iter(find_images(str(folder)))),
    "text": read_all,
}


def write_bomb(file: Path, column: str, values: list[bytes], rows: list[int]) -> None:
    """Some large values and which of them each row is: unpacked some ten gigabytes."""
    large = pyarrow.DictionaryArray.from_arrays(pyarrow.array(rows, pyarrow.int32()), pyarrow.array(values))
    if column == "text":
        large = pyarrow.DictionaryArray.from_arrays(large.indices, large.dictionary.cast(pyarrow.string()))
    else:
        path = pyarrow.nulls(len(rows), pyarrow.string())
        large = pyarrow.StructArray.from_arrays([large, path], ["bytes", "path"])
    table = pyarrow.table({column: large, "label": [0] * len(rows)})
    parquet.write_table(
        table, file, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 30
    )
    assert file.stat().st_size < 50_000


@pytest.mark.parametrize("reader", ["labelled", "images", "text", "cifar10"])
def test_a_bomb_of_parquet_takes_no_more_than_its_limit(tmp_path: Path, reader: str) -> None:
    file = tmp_path / "train-0.parquet"
    column = {"text": "text", "cifar10": "img"}.get(reader, "image")
    write_bomb(file, column, [b"x" * 30_000_000], [0] * 1000)
    before = pyarrow.default_memory_pool().bytes_allocated()
    if reader in ("labelled", "cifar10"):
        read = READERS.get(reader) or (
            lambda folder: ParquetFolder(folder).read("train", lambda _: {}, SkippedExamples(0))
        )
        with pytest.raises(
            DataError, match=rf"0\.parquet: .*its column '{column}' unpacks to more than 268,435"
        ):
            read(tmp_path)
    else:
        with parquet.ParquetFile(file) as table:
            rows = values(table, file, column)
            assert [len(next(rows)) for _ in range(9)] == [2] * 9
            assert pyarrow.default_memory_pool().bytes_allocated() - before < 200_000_000
    assert pyarrow.default_memory_pool().bytes_allocated() - before < 400_000_000


@pytest.mark.parametrize("reader", READERS)
def test_what_a_footer_says_of_a_bomb_is_enough(tmp_path: Path, reader: str) -> None:
    file = tmp_path / "train-0.parquet"
    write_bomb(file, "text" if reader == "text" else "image", [b"x" * 300_000_000], [0])
    before = pyarrow.default_memory_pool().bytes_allocated()
    with pytest.raises(DataError, match=r"row group 0 of its column '.*' unpacks to more than 268,435,456"):
        READERS[reader](tmp_path)
    assert pyarrow.default_memory_pool().bytes_allocated() - before < 100_000_000


def test_a_document_of_a_table_has_the_limit_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MOST_BYTES", 1000)
    write_bomb(tmp_path / "a.parquet", "text", [b"short", b"x" * 1001], [0, 1, 0])
    files = find_documents(str(tmp_path))
    texts = [text for _, text in files.read(tmp_path / "a.parquet")]
    assert texts[::2] == ["short", "short"]
    assert "more than 1,000 bytes; split it" in str(texts[1])


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
    found = find_labelled(str(tmp_path), "train")
    assert found is not None
    with EchoLoader(found.source, 1, max_bad_examples=1, epochs=1) as loader:
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
