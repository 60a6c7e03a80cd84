"""Servers on the loopback interface, each in a thread of this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer

from scripts.slow_store import Ranges


class Quiet(Ranges):
    """Serves files of a folder, or ranges of them, without a log."""


@contextmanager
def running(server: BaseServer) -> Iterator[None]:
    """Serve inside the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving(folder: Path, handler: type[SimpleHTTPRequestHandler] = Quiet) -> Iterator[str]:
    """Serve the files of a folder; yields the address ``127.0.0.1:<port>``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    with running(server):
        yield f"127.0.0.1:{server.server_port}"
