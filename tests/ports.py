"""Ports for servers that tests start."""

import random
import socket
from contextlib import suppress

_choose = random.SystemRandom()  # parallel tests need different ports, also with equal seeds


def free_port() -> int:
    """A free port below those that systems assign to outgoing connections, so that it stays free."""
    while True:
        port = _choose.randrange(10_000, 16_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
