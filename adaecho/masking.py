"""Urls as they are recorded and shown: without user, password and query.

Credentials belong into the environment, where fsspec and the hub look for them.
"""

import re
from typing import Any

_USER, _QUERY = re.compile(r"(?<=://)[^\s/@]*@"), re.compile(r"(://[^\s?'\"]+)\?[^\s'\"]+")


def masked(value: Any) -> Any:
    """A text with ``https://***@host/path?***`` for its urls; of dicts and lists every text in them."""
    if isinstance(value, dict):
        return {key: masked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    return _QUERY.sub(r"\1?***", _USER.sub("***@", value)) if isinstance(value, str) else value
