"""Files of others that would ask for more memory than there is, or count less than no rows."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from adaecho.datasets import documents
from adaecho.datasets.documents import find_documents
from adaecho.datasets.labelled_images import find_images, find_labelled
from adaecho.errors import DataError


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
    for read in (
        lambda: find_labelled(str(tmp_path), "train"),
        lambda: list(find_images(str(tmp_path))),
        lambda: read_all(tmp_path),
    ):
        with pytest.raises(DataError, match=r"train-0\.parquet: not readable as parquet"):
            read()
