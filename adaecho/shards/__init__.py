"""Tar shards on disk, over http(s) and on the stores of fsspec. Imports nothing of ours."""

from adaecho.shards.indexed import IndexedTarShards as IndexedTarShards
from adaecho.shards.remote import Retries as Retries
from adaecho.shards.remote import TransferError as TransferError
from adaecho.shards.sequential import TarShards as TarShards
from adaecho.shards.tar import ArchiveError as ArchiveError

__all__ = ["ArchiveError", "IndexedTarShards", "Retries", "TarShards", "TransferError"]
