"""Data echoing and AdaScale for PyTorch.

Two drop-ins, ``EchoLoader`` and ``AdaScale``, and a framework that reproduces "Faster Neural Network
Training with Data Echoing" (Choi, Passos, Shallue, Dahl 2019). Importing the package imports no torch
until one of the two is touched.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaecho.adascale import AdaScale as AdaScale
    from adaecho.echo import EchoLoader as EchoLoader
    from adaecho.shards import IndexedTarShards as IndexedTarShards
    from adaecho.shards import Retries as Retries
    from adaecho.shards import TarShards as TarShards

__all__ = ["AdaScale", "EchoLoader", "IndexedTarShards", "Retries", "TarShards"]

_ROOMS = {"AdaScale": "adaecho.adascale", "EchoLoader": "adaecho.echo"}
_ROOMS |= dict.fromkeys(("IndexedTarShards", "Retries", "TarShards"), "adaecho.shards")


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'adaecho' has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)
