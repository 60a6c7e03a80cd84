"""Ports for servers that tests start."""

import random
import socket
import subprocess
import time
from contextlib import suppress

_choose = random.SystemRandom()  # tests side by side, and those that seed all else alike, take different ones


def free_port() -> int:
    """One that nothing listens at, nor will before it is used.

    It lies below those that systems give to outgoing connections: any of these may be taken a moment later.
    """
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
