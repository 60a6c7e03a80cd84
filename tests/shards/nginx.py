"""A real nginx on loopback, and a proxy in front of it that breaks connections."""

import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scripts.slow_store import find_nginx, start_nginx
from tests.needs import needs
from tests.ports import free_port
from tests.servers import running

_PROGRAM = find_nginx()

needs_nginx = needs("nginx", present=_PROGRAM is not None, remedy="on Debian: apt-get install nginx-light")

_SERVER = """
    root {root};
    location /slow/ {{ alias {root}/; limit_rate 200k; }}
    location /whole/ {{ alias {root}/; max_ranges 0; }}
    location /broken/ {{ return 503; }}
    location /forbidden/ {{ return 403; }}
    location /faulty/ {{
      alias {root}/;
      if (-f {folder}/503) {{ return 503; }}
      if (-f {folder}/429) {{ return 429; }}
      if (-f {folder}/408) {{ return 408; }}
    }}
"""


@contextmanager
def nginx(folder: Path, root: Path) -> Iterator[str]:
    """The url under which it serves a folder; ``slow/``, ``whole/`` (no ranges), ``broken/`` below it.

    Below ``faulty/`` every answer is a 503, 429 or 408 while its own folder holds a file of that name.
    """
    assert _PROGRAM is not None
    folder.mkdir()
    port = free_port()
    server = start_nginx(_PROGRAM, folder, port, _SERVER.format(folder=folder, root=root))
    try:
        wait_until_it_listens(port, server)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait(60)


def wait_until_it_listens(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class Proxy(socketserver.ThreadingTCPServer):
    """Passes connections on, each after its own fault.

    Attributes:
        faults: for each connection to come: ``("cut", n)`` closes it after n bytes of content,
            ``("reset", n)`` resets it, ``("stall", n)`` says no more, ``("drip", n)`` goes on with 20 bytes a
            second. Later ones are passed on whole.
        ranges: the Range header of each request so far.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.upstream = ("127.0.0.1", int(server.rpartition(":")[2].strip("/")))
        self.faults: list[tuple[str, int]] = []
        self.ranges: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.dripped = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"


@contextmanager
def proxied(server: str) -> Iterator[Proxy]:
    """One in front of a server."""
    proxy = Proxy(server)
    with running(proxy):
        yield proxy


class _Connection(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        fault, limit = self.server.faults.pop(0) if self.server.faults else ("none", 1 << 60)
        with socket.create_connection(self.server.upstream) as upstream:
            head = self._head()
            lines = head.decode().splitlines()
            ranges = [line.partition(": ")[2] for line in lines if line.startswith("Range")]
            self.server.ranges += ranges or [""]
            upstream.sendall(head)
            # The fault counts bytes of content: the answer's own head goes through.
            limit += self._pass_head(upstream)
            self._pass(upstream, limit)
            if fault == "drip":
                self._drip(upstream)
        if fault == "stall":
            self.request.settimeout(120)
            self.request.recv(1)  # until the client gives up
        elif fault == "reset":
            linger = b"\1\0\0\0\0\0\0\0"
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if fault != "none":
            self.server.meanwhile()

    def _head(self) -> bytes:
        head = b""
        while not head.endswith(b"\r\n\r\n") and (piece := self.request.recv(4096)):
            head += piece
        return head

    def _pass_head(self, upstream: socket.socket) -> int:
        self._peeked = upstream.recv(1 << 16)
        return self._peeked.find(b"\r\n\r\n") + 4

    def _pass(self, upstream: socket.socket, limit: int) -> None:
        piece = self._peeked
        with suppress(OSError):  # the client has gone
            while piece and limit > 0:
                self.request.sendall(piece[:limit])
                self._left = piece[limit:]
                limit -= len(piece)
                if limit > 0:
                    piece = upstream.recv(1 << 16)

    def _drip(self, upstream: socket.socket) -> None:
        with suppress(OSError):  # the client has gone
            while piece := self._left or upstream.recv(1 << 16):
                self._left = b""
                for byte in piece:
                    self.request.sendall(bytes([byte]))
                    self.server.dripped.set()
                    time.sleep(0.05)
