"""Transfers from a real nginx, through a proxy that breaks them; from fsspec; and of local files."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from adaecho import IndexedTarShards
from adaecho.shards import remote
from adaecho.shards.remote import Retries, Transfer, TransferError, Version
from tests.shards.archives import QUICK, number_of, read_all, write_shard
from tests.shards.nginx import Proxy, needs_nginx, nginx, proxied

SIZE = 300_000
CONTENT = np.random.default_rng(0).bytes(SIZE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("nginx")
    root = folder / "root"
    root.mkdir()
    (root / "file").write_bytes(CONTENT)
    (root / "empty").write_bytes(b"")
    with nginx(folder / "server", root) as url:
        yield url


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with proxied(server) as started:
        yield started


@needs_nginx
@pytest.mark.parametrize("place", ["", "whole/", "slow/"])
def test_reads_any_part(server: str, place: str) -> None:
    url = f"{server}{place}file"
    if place != "slow/":
        assert read_all(url) == CONTENT
    assert read_all(url, start=299_000) == CONTENT[299_000:]
    assert read_all(url, start=1000, end=150_000) == CONTENT[1000:150_000]
    assert read_all(f"{server}{place}empty") == b""


@needs_nginx
@pytest.mark.parametrize("fault", ["cut", "reset", "stall"])
def test_a_broken_transfer_is_resumed_at_its_byte(proxy: Proxy, fault: str) -> None:
    proxy.faults = [(fault, 100_000), (fault, 0), (fault, 50_000), (fault, 1)]
    assert read_all(f"{proxy.url}file") == CONTENT
    starts = [int(asked.removeprefix("bytes=").rstrip("-") or 0) for asked in proxy.ranges]
    assert len(starts) == 5
    if fault != "reset":  # which may destroy what had arrived
        assert starts == [0, 100_000, 100_000, 150_000, 150_001]


@needs_nginx
def test_a_server_without_ranges_is_read_again_up_to_the_byte(proxy: Proxy) -> None:
    proxy.faults = [("cut", 100_000), ("cut", 30_000), ("cut", 200_000)]
    assert read_all(f"{proxy.url}whole/file") == CONTENT
    assert proxy.ranges == ["", "bytes=100000-", "bytes=100000-", "bytes=200000-"]


@needs_nginx
def test_after_the_tries_the_error_names_url_byte_and_cause(proxy: Proxy) -> None:
    url = f"{proxy.url}file"
    proxy.faults = [("cut", 7000)] + 3 * [("cut", 0)]
    with pytest.raises(TransferError, match=r"at byte 7000 failed after 3 tries: it ended 293000 bytes"):
        read_all(url)
    proxy.faults = 3 * [("stall", 0)]
    with pytest.raises(TransferError, match="at byte 0 failed after 3 tries: TimeoutError") as caught:
        read_all(url)
    assert str(caught.value).startswith(url)
    assert isinstance(caught.value.__cause__, TimeoutError)


@needs_nginx
def test_a_5xx_is_tried_again_and_other_4xx_are_not(proxy: Proxy) -> None:
    for place, tries in (("broken/file", 3), ("forbidden/file", 1), ("missing", 1)):
        proxy.ranges.clear()
        with pytest.raises(TransferError, match=r"HTTP Error (503|403|404)"):
            read_all(f"{proxy.url}{place}")
        assert len(proxy.ranges) == tries


@needs_nginx
@pytest.mark.parametrize("status", ["503", "429", "408"])
def test_a_server_that_recovers_is_read_on(
    tmp_path: Path, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, fault = tmp_path / "root", tmp_path / "server" / status
    root.mkdir()
    (root / "file").write_bytes(CONTENT)
    waits: list[float] = []

    def rest(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) % 2 == 0:
            fault.unlink()

    monkeypatch.setattr(remote, "rest", rest)
    with nginx(tmp_path / "server", root) as server, proxied(server) as proxy:
        transfer = Transfer(f"{proxy.url}faulty/file", retries=Retries(tries=3, delay_s=1))
        fault.touch()
        proxy.faults = 2 * [("none", 1 << 60)] + [("cut", 9000)]
        assert transfer.read(9000) == CONTENT[:9000]
        fault.touch()
        assert transfer.read(SIZE) == CONTENT[9000:]
        transfer.close()
    assert waits == [1, 2, 1, 2]
    assert proxy.ranges == ["", "", "", "bytes=9000-", "bytes=9000-"]


@needs_nginx
@pytest.mark.parametrize("place", ["", "whole/"])
def test_to_begin_at_the_end_is_to_read_nothing(server: str, place: str) -> None:
    assert read_all(f"{server}{place}file", start=SIZE) == b""
    transfer = Transfer(f"{server}{place}file", retries=QUICK)
    assert transfer.read(10) == CONTENT[:10]
    transfer.skip(2 << 20)  # further than the file reaches
    assert transfer.read(1) == b""
    assert transfer.offset == SIZE
    if not place:
        with pytest.raises(TransferError, match=f"failed: ValueError: the file is {SIZE} bytes long"):
            read_all(f"{server}file", start=SIZE + 1)


@needs_nginx
@pytest.mark.parametrize("length", [SIZE, SIZE - 1])
def test_a_file_that_changes_on_the_way_is_an_error(tmp_path: Path, length: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(CONTENT)

    def change() -> None:
        (root / "new").write_bytes(bytes(length))
        (root / "new").replace(root / "file")
        os.utime(root / "file", (1, 1))

    with nginx(tmp_path / "server", root) as server, proxied(server) as proxy:
        proxy.faults, proxy.meanwhile = [("cut", 5000)], change
        with pytest.raises(TransferError, match="at byte 5000 failed after 2 tries: the file has changed"):
            read_all(f"{proxy.url}file")


def test_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(remote, "rest", waits.append)
    with pytest.raises(TransferError, match=r"after 7 tries: .*refused"):
        read_all("http://127.0.0.1:9/", Retries(tries=7, delay_s=1, longest_delay_s=6, timeout_s=1))
    assert waits == [1, 2, 4, 6, 6, 6]
    with pytest.raises(TransferError, match="at byte 0 failed: "):  # a url that can't be, at once
        read_all("http://host:port/")


class Flaky(MemoryFileSystem):
    """Of fsspec; breaks the first reads."""

    protocol = "flaky"
    failures = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.replace("flaky://", "memory://"))
        return stripped

    def _open(self, *arguments: Any, **options: Any) -> Any:
        if Flaky.failures:
            Flaky.failures -= 1
            raise OSError("503 Slow Down")
        return super()._open(*arguments, **options)


@pytest.fixture
def stored() -> Iterator[str]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    with fsspec.open("memory://bucket/file", "wb") as file:
        file.write(CONTENT)
    yield "flaky://bucket/file"
    Flaky.failures = 0
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_a_store_of_fsspec_is_read_and_tried_again(stored: str) -> None:
    Flaky.failures = 2
    assert read_all(stored) == CONTENT
    assert read_all(stored, start=1000) == CONTENT[1000:]
    assert read_all(stored, start=1000, end=2000) == CONTENT[1000:2000]
    Flaky.failures = 3
    with pytest.raises(TransferError, match=r"flaky://bucket/file: .* after 3 tries: OSError: 503"):
        read_all(stored)
    with pytest.raises(TransferError, match="failed: FileNotFoundError"):
        read_all(stored + "s")


@pytest.mark.parametrize("scheme", ["local://", "memory://"])
def test_a_shard_of_a_store_that_has_changed_is_an_error(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}{tmp_path}/a.tar"

    def put(begin: int, count: int) -> None:
        write_shard(tmp_path / "made.tar", list(range(begin, begin + count)))
        with fsspec.open(url, "wb") as file:
            file.write((tmp_path / "made.tar").read_bytes())

    put(10, 5)
    source = IndexedTarShards(url, index=tmp_path / "index.npz")
    assert number_of(source[0]) == 10
    put(20, 5)
    for again in (source, IndexedTarShards(url, index=tmp_path / "index.npz")):
        with pytest.raises(TransferError, match="the file has changed"):
            again[0]
    put(10, 30)
    with pytest.raises(TransferError, match=r"the file has changed: it was .* bytes long"):
        IndexedTarShards(url, index=tmp_path / "index.npz")[0]


def test_what_fsspec_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match="pip install fsspec s3fs"):
        read_all("s3://bucket/file")


def test_local_files_keep_their_own_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    assert read_all(str(tmp_path / "file"), start=10, end=20) == CONTENT[10:20]
    assert read_all(f"file://{tmp_path}/file") == CONTENT
    with pytest.raises(FileNotFoundError):
        read_all(str(tmp_path / "missing"))
    transfer = Transfer(str(tmp_path / "file"), retries=QUICK, version=Version(5))
    with pytest.raises(TransferError, match="the file has changed"):
        transfer.read(1)


@pytest.mark.parametrize("argument", ["tries", "timeout_s"])
def test_retries_that_can_not_be(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument}=0"):
        Retries(**{argument: 0})


@pytest.mark.parametrize(
    "url", ["reference://a.tar::file://{}", "simplecache::reference://a.tar::file://{}", "Reference://{}",
            "dask://127.0.0.1:9/a.tar::file://{}", "simplecache::dask::file://{}"]
)  # fmt: skip
def test_an_index_of_fsspecs_that_may_be_code_is_not_opened(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *_: pytest.fail("it was asked"))
    with pytest.raises(TransferError, match=r"failed: ValueError: (reference|dask):// runs what others say"):
        read_all(url.format(tmp_path / "refs.tar"))
