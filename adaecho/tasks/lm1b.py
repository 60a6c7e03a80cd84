"""LM1B (Chelba et al. 2014) with Transformer base, as in the paper's Table 1: 3.9 nats a token.

An example is one sentence, with a mask: 20,000 steps of 1,024 are 0.68 epoch of 30.3 M sentences, where
packed blocks of 128 would be about 3, and the paper's budget reads as less than one.
"""

from adaecho.config.schema import Config
from adaecho.errors import DataError
from adaecho.tasks.base import Task
from adaecho.tasks.options import Lm1bOptions as Options
from adaecho.tasks.text import build_cached


def build(config: Config, options: Options) -> Task:
    """The lm1b task; see ``build_cached``.

    Raises:
        DataError: ``data.path`` is not set.
    """
    if config.data.path is None:
        raise DataError(
            "data.path=null: lm1b needs a folder with parquet files (column text) or with the original text "
            "files, a sentence a line, or the hub id of such a copy; the hub's own lm1b was a script, which "
            "datasets no longer runs"
        )
    return build_cached(config, options, name="lm1b")
