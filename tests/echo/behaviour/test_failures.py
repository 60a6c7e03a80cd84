"""Errors of machine and network are raised; errors of an example count as bad ones."""

import errno
import http.client
import io
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.read.failures import is_of_machine


def raised(action: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever it is)
        action()
    assert isinstance(caught.value, Exception)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        urllib.error.URLError("connection reset"),
        http.client.IncompleteRead(b"", 7),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        ssl.SSLCertVerificationError(1, "certificate has expired"),
        ConnectionResetError("peer went away"),
        MemoryError(),
        *(
            OSError(number, "of the machine")
            for number in (errno.EIO, errno.EMFILE, errno.ENOSPC, errno.ESTALE)
        ),
    ],
    ids=repr,
)
def test_machine_and_network(error: Exception) -> None:
    assert is_of_machine(error)


@pytest.mark.parametrize(
    "error", [OSError("truncated"), OSError(errno.EINVAL, "seek"), KeyError("x")], ids=repr
)
def test_the_example(error: Exception) -> None:
    assert not is_of_machine(error)


def test_a_truncated_image_is_a_bad_example() -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(file, "JPEG")
    truncated = raised(lambda: image.open(io.BytesIO(file.getvalue()[:-700])).load())
    assert isinstance(truncated, OSError)
    assert not is_of_machine(truncated)
    assert not is_of_machine(raised(lambda: image.open(io.BytesIO(b"no image"))))


def test_network_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    unserved = "http://127.0.0.1:9/"
    assert is_of_machine(raised(lambda: urllib.request.urlopen(unserved, timeout=5)))
    requests = pytest.importorskip("requests")
    error = raised(lambda: requests.get(unserved, timeout=5))
    assert isinstance(error, OSError)
    assert error.errno is None
    assert is_of_machine(error)
    assert is_of_machine(requests.exceptions.ChunkedEncodingError())
    assert not is_of_machine(requests.exceptions.JSONDecodeError("no json", "", 0))
    urllib3 = pytest.importorskip("urllib3")
    assert is_of_machine(raised(lambda: urllib3.PoolManager(retries=False).request("GET", unserved)))
    assert is_of_machine(pytest.importorskip("httpx").ReadTimeout("too slow"))
    assert is_of_machine(pytest.importorskip("aiohttp").ServerDisconnectedError())


class Many:
    """Rows of which one fails, alone or asked for together with others."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> int:
        if row == 3:
            raise self._error
        return row

    def __getitems__(self, rows: list[int]) -> list[int]:
        return [self[row] for row in rows]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_raises_or_counts(num_workers: int) -> None:
    common: dict[str, Any] = {"order": "stored", "max_bad_examples": 8, "num_workers": num_workers}

    def decode(row: int) -> int:
        return Many(OSError(errno.EMFILE, "Too many open files"))[row]

    for source, arguments in (
        (Many(OSError(errno.EMFILE, "Too many open files")), {}),
        (list(range(8)), {"decode": decode}),
    ):
        loader = EchoLoader(source, 4, **arguments, **common)
        with pytest.raises(OSError, match="Too many open files") as caught:
            next(iter(loader))
        assert "while reading" in caught.value.__notes__[0]
        assert loader.bad_examples == []
    with EchoLoader(Many(OSError("broken data stream")), 4, **common) as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 4]
        assert len(loader.bad_examples) == 1


def decode_ones(row: int) -> dict[str, int]:
    if row != 1:
        raise ValueError(f"row {row} is bad")
    return {"row": row}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("iterated", [False, True])
def test_a_source_of_bad_examples_alone_ends_within_any_budget(num_workers: int, iterated: bool) -> None:
    rows = [2] * 30
    source: Any = (lambda: iter(rows)) if iterated else rows
    with EchoLoader(source, 4, decode=decode_ones, max_bad_examples=100, num_workers=num_workers) as loader:
        error = raised(lambda: next(iter(loader)))
    assert "were all bad" in error.__notes__[0]


def test_one_good_example_among_many_bad_ones_is_found_in_each_pass() -> None:
    rows = [2] * 800 + [1] + [2] * 800
    loader = EchoLoader(rows, 1, decode=decode_ones, max_bad_examples=1600)
    assert [int(batch["row"]) for batch in islice(loader, 4)] == [1] * 4
    assert len(loader.bad_examples) == 1600
