"""Ports for servers that tests start."""

import random
import socket
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
