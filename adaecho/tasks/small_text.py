"""A small Transformer on text at hand: by default the source of this Python's standard library.

The library differs between Python versions: its sha256 is in the record, and results are never compared
across versions.
"""

from dataclasses import dataclass

from adaecho.config.schema import Config
from adaecho.tasks.base import Task
from adaecho.tasks.text import TextOptions, build_cached


@dataclass
class Options(TextOptions):
    """The keys ``task.*``."""

    layers: int = 2
    width: int = 128
    feed_forward: int = 512
    heads: int = 4
    vocabulary: int = 4096


def build(config: Config, options: Options) -> Task:
    """The small_text task; see ``build_cached``."""
    return build_cached(config, options, name="small_text")
