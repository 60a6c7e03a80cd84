"""Ports for servers that tests start."""

import random
import socket
import subprocess
import time
from contextlib import suppress

_choose = random.SystemRandom()  # parallel tests need different ports, also with equal seeds


def free_port() -> int:
    """A free port below those that systems assign to outgoing connections, so that it stays free."""
    while True:
        port = _choose.randrange(10_000, 16_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


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
