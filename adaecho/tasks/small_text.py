"""A small Transformer on text at hand: by default the source of this Python's standard library.

The library differs between Python versions: its sha256 is in the record, and results are never compared
across versions.
"""

from adaecho.config.schema import Config
from adaecho.tasks.base import Task
from adaecho.tasks.options import SmallTextOptions as Options
from adaecho.tasks.text import build_cached


def build(config: Config, options: Options) -> Task:
    """The small_text task; see ``build_cached``."""
    return build_cached(config, options, name="small_text")
