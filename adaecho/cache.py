"""The folder of files that can be recomputed, such as tokens."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$ADAECHO_CACHE`` if set, otherwise ``adaecho`` in the user's cache folder."""
    own = os.environ.get("ADAECHO_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "adaecho"
