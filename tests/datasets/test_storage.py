"""The digest of files, what storage refuses, and examples to skip."""

import os
from pathlib import Path

import pytest

from adaecho.datasets.storage import FILES, SkippedExamples, fingerprint_of, storage_errors
from adaecho.errors import DataError


def test_names_and_sizes_of_files_count_and_where_they_lie_does_not(tmp_path: Path) -> None:
    def write(top: str, content: bytes = b"abc") -> list[Path]:
        files = [tmp_path / top / "class" / f"{number}.bin" for number in range(3)]
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.write_bytes(content)
        return files

    files = write("one")
    first = fingerprint_of(files)
    assert list(first) == [FILES]
    os.utime(files[0], (1, 1))
    assert fingerprint_of(files) == fingerprint_of(files[::-1]) == fingerprint_of(write("other")) == first
    assert fingerprint_of(files[:2]) != first
    assert fingerprint_of(write("one", b"abcd")) != first
    assert fingerprint_of([]) == {}
    files[1].unlink()
    with pytest.raises(DataError, match=r"1\.bin: can't be read \(No such file"):
        fingerprint_of(files)


@pytest.mark.parametrize(
    "error", [ConnectionError("a.tar: gone"), FileNotFoundError(2, "No such file", "a.tar")]
)
def test_what_storage_refuses_is_told(error: OSError) -> None:
    with pytest.raises(DataError, match=r"a\.tar: .*run the same command again"), storage_errors():
        raise error


def test_bad_examples_are_told_within_the_budget_and_an_error_beyond(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = SkippedExamples(2)
    bad.add("a", "one")
    bad.add("b", "two")
    assert bad.count == 2
    assert "bad example skipped: b: two" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"(?s)data\.max_bad_examples=2 allows.*a: one.*b: two.*c: three"):
        bad.add("c", "three")
