"""Read tar shards from disk, over http(s), or from any store that fsspec supports."""

from adaecho.shards.tar_shards import TarShards as TarShards

__all__ = ["TarShards"]
