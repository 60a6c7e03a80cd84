"""The folder of files that can be recomputed, such as tokens."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$ADAECHO_CACHE`` if set, otherwise ``adaecho`` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "adaecho")
    return Path(os.environ.get("ADAECHO_CACHE") or default).expanduser()
