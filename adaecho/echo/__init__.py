"""EchoLoader: data echoing as a drop-in for torch.utils.data.DataLoader."""

from adaecho.echo.indexed_shards import IndexedTarShards as IndexedTarShards
from adaecho.echo.loader import EchoLoader as EchoLoader
from adaecho.echo.remote import Retries as Retries
from adaecho.echo.remote import TransferError as TransferError
from adaecho.echo.shards import TarShards as TarShards

__all__ = ["EchoLoader", "IndexedTarShards", "Retries", "TarShards", "TransferError"]
