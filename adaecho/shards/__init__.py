"""Tar shards on disk, over http(s) and on the stores of fsspec. Imports nothing of ours."""

from adaecho.shards.indexed import IndexedTarShards as IndexedTarShards
from adaecho.shards.remote import Retries as Retries
from adaecho.shards.remote import TransferError as TransferError
from adaecho.shards.sequential import TarShards as TarShards

__all__ = ["IndexedTarShards", "Retries", "TarShards", "TransferError"]
