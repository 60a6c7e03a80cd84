"""Find the cache folder. It contains only files that can be recomputed, such as tokenized text."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$ADAECHO_CACHE`` if it is set, otherwise ``adaecho`` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "adaecho")
    return Path(os.environ.get("ADAECHO_CACHE") or default).expanduser()
