"""Digests of files: equal for equal bytes, another for another file, and cheap where the files are large."""

import os
from pathlib import Path

import pytest

from adaecho.datasets import fingerprint
from adaecho.datasets.fingerprint import fingerprint_of
from adaecho.errors import DataError
from tests.servers import serving


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_every_byte_of_small_files_counts_and_times_do_not(tmp_path: Path) -> None:
    content = os.urandom(300_000)
    files = [write(tmp_path / f"{number}.bin", content) for number in range(3)]
    first = fingerprint_of(files)
    assert list(first) == [str(file) for file in files]
    assert len({*first.values()}) == 1
    os.utime(files[0], (1, 1))
    assert fingerprint_of(files) == first
    for at in (0, 77_777, 299_999):
        write(files[1], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        changed = fingerprint_of(files)
        assert [name for name in first if changed[name] != first[name]] == [str(files[1])]
    assert fingerprint_of(files[::2]) == {str(file): first[str(file)] for file in files[::2]}


def test_of_large_files_size_ends_and_samples_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_WHOLE", 1 << 20)
    content = bytearray(os.urandom(3 << 20))
    file = write(tmp_path / "a.tar", content)
    first = fingerprint_of([file])
    changes = {
        "longer": content + b"x",
        "first": b"\0" * 512 + content[512:],
        "last": content[:-512] + b"\0" * 512,
        "labels all over": bytes(byte ^ 1 if at % 1000 == 0 else byte for at, byte in enumerate(content)),
    }
    for name, changed in changes.items():
        assert fingerprint_of([write(file, changed)]) != first, name
    assert fingerprint_of([write(file, content)]) == first


def test_many_files_have_one_digest_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_NAMED", 8)
    places = [f"{folder}/{number}.jpg" for folder in "ab" for number in range(20)]
    files = [write(tmp_path / place, place.encode()) for place in places]
    first = fingerprint_of(files)
    assert list(first) == [f"{tmp_path}/a/", f"{tmp_path}/b/"]
    without = fingerprint_of(files[:-1])
    assert without[f"{tmp_path}/b/"] != first[f"{tmp_path}/b/"]
    write(files[0], b"other")  # among those that are looked at
    assert fingerprint_of(files)[f"{tmp_path}/a/"] != first[f"{tmp_path}/a/"]


def test_of_files_over_http_length_time_and_beginning_count(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tar", bytes(200_000))
    os.utime(file, (1_000_000_000, 1_000_000_000))
    with serving(tmp_path) as place:
        url = f"http://{place}/a.tar"
        first = fingerprint_of([url])
        assert fingerprint_of([url]) == first
        for changed, time in ((bytes(200_001), 1_000_000_000), (bytes(199_999) + b"x", 1_000_000_001)):
            write(file, changed)
            os.utime(file, (time, time))
            assert fingerprint_of([url]).keys() == first.keys()
            assert fingerprint_of([url]) != first
        write(file, b"x" + bytes(199_999))
        os.utime(file, (1_000_000_000, 1_000_000_000))
        assert fingerprint_of([url]) != first
        with pytest.raises(DataError, match=r"b\.tar: reading at byte 0 failed: HTTPError: .*404"):
            fingerprint_of([url.replace("a.tar", "b.tar")])


def test_what_is_gone_is_named_and_of_no_files_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.tar: can't be read \(No such file"):
        fingerprint_of([tmp_path / "gone.tar"])
    assert fingerprint_of([]) == {}
