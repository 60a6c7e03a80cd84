"""The digest of files, errors of storage, and bad examples."""

import os
from pathlib import Path

import pytest

from adaecho.datasets.storage import FILES, BadExampleBudget, digest_of_files, storage_errors
from adaecho.errors import DataError


def test_the_digest_depends_on_names_and_sizes_and_not_on_the_location(tmp_path: Path) -> None:
    def write(top: str, content: bytes = b"abc") -> list[Path]:
        files = [tmp_path / top / "class" / f"{number}.bin" for number in range(3)]
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.write_bytes(content)
        return files

    files = write("one")
    first = digest_of_files(files)
    assert list(first) == [FILES]
    os.utime(files[0], (1, 1))
    assert digest_of_files(files) == digest_of_files(files[::-1]) == digest_of_files(write("other")) == first
    assert digest_of_files(files[:2]) != first
    assert digest_of_files(write("one", b"abcd")) != first
    assert digest_of_files([]) == {}
    files[1].unlink()
    with pytest.raises(DataError, match=r"1\.bin: cannot be read \(No such file"):
        digest_of_files(files)


@pytest.mark.parametrize(
    "error", [ConnectionError("a.tar: gone"), FileNotFoundError(2, "No such file", "a.tar")]
)
def test_errors_of_storage_name_the_file_and_the_remedy(error: OSError) -> None:
    with pytest.raises(DataError, match=r"a\.tar: .*run the same command again"), storage_errors():
        raise error


def test_bad_examples_are_listed_within_the_budget_and_an_error_beyond(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = BadExampleBudget(2)
    bad.add("a: one", "b: two")
    assert bad.found == ["a: one", "b: two"]
    assert "bad example skipped: b: two" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"(?s)data\.max_bad_examples=2 allows.*a: one.*b: two.*c: three"):
        bad.add("c: three")
