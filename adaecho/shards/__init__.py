"""Tar shards on disk, over http(s), and on the stores of fsspec."""

from adaecho.shards.tar_shards import TarShards as TarShards

__all__ = ["TarShards"]
