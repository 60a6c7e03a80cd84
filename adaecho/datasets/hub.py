"""The Hugging Face hub: data sets by their id, and what happens where it can't be reached."""

import os
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from adaecho.errors import DataError


def load(name: str, *, configuration: str | None = None, split: str | None = None) -> Any:
    """A data set of the hub as ``datasets`` loads it, through its cache.

    Args:
        name: owner/name.
        configuration: where the data set has several.
        split: one of its splits; None for all of them.

    Raises:
        DataError: it can't be had.
    """
    skip_retries_offline()
    import datasets  # seconds to import, and needed here alone

    path = name if configuration is None else f"{name}/{configuration}"
    try:
        # Its files are mapped, also where HF_DATASETS_IN_MEMORY_MAX_SIZE asks for small ones in memory.
        return datasets.load_dataset(name, configuration, split=split, keep_in_memory=False)
    except Exception as error:  # the hub's client raises many kinds, and all mean the same here
        raise DataError(
            f"data.path={path}: there is no such file or folder, and as a hub id it can't be loaded "
            f"({type(error).__name__}: {error}). Check name, connection and access, or point data.path= at a "
            "local copy; a data set that is a script can't be loaded, its files can"
        ) from error


def files_of(split: Any) -> list[Path]:
    """Where ``datasets`` keeps it."""
    return [Path(file["filename"]) for file in split.cache_files]


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
