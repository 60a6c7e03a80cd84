"""Small tar shards on disk, and on a server with faults."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adaecho.shards import transfer
from tests.servers import Quiet, serving
from tests.shards.archives import NUM_EXAMPLES, write_shards


class Store(Quiet):
    """Serves a folder with faults.

    Attributes:
        faults: of the next requests: a status, ("cut", n) or ("reset", n) after n bytes, or "whole"
            to ignore the range. Further requests succeed.
        ranges: the Range header of each request so far.
    """

    faults: list[Any]
    ranges: list[str]

    def do_GET(self) -> None:  # noqa: N802
        self.ranges.append(self.headers.get("Range", ""))
        self.fault = self.faults.pop(0) if self.faults else None
        if isinstance(self.fault, int):
            self.send_error(self.fault)
            return
        if self.fault == "whole":
            del self.headers["Range"]
        super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        if not isinstance(self.fault, tuple):
            super().copyfile(source, outputfile)
            return
        kind, size = self.fault
        outputfile.write(source.read(size))
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, small pieces, and no proxy of this machine."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(transfer, "_DELAYS_S", (0.001, 0.001))
    monkeypatch.setattr(transfer, "_PIECE", 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", 4, NUM_EXAMPLES)
    return tmp_path / "data"


@pytest.fixture
def store(folder: Path) -> Iterator[type[Store]]:
    """The server of ``folder``; its url is ``store.url``."""
    handler: Any = type("OneStore", (Store,), {"faults": [], "ranges": []})
    with serving(folder, handler) as place:
        handler.url = f"http://{place}/"
        yield handler
