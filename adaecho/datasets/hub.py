"""The Hugging Face hub, where it can't be reached."""

import os
import socket
import sys
from urllib.parse import urlsplit
from urllib.request import getproxies


def skip_retries_offline() -> None:
    """Without a network, have the hub's libraries look into their cache alone.

    They would try each file five times, half a minute in all, and log every attempt twice. They read the
    environment once, so this must come before their import.
    """
    if "huggingface_hub" in sys.modules or getproxies():
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
