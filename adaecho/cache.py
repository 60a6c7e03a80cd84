"""Where files lie that can be made again: tokens of text."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$ADAECHO_CACHE``, else ``adaecho`` in the user's cache folder."""
    own = os.environ.get("ADAECHO_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "adaecho"
