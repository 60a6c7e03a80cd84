"""Data echoing and AdaScale for PyTorch.

Two drop-ins, ``EchoLoader`` and ``AdaScale``, and a framework that reproduces "Faster Neural Network
Training with Data Echoing" (Choi, Passos, Shallue, Dahl 2019). Importing the package imports no torch
until one of the two is touched.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaecho.adascale import AdaScale as AdaScale
    from adaecho.echo import EchoLoader as EchoLoader
    from adaecho.shards import IndexedTarShards as IndexedTarShards
    from adaecho.shards import Retries as Retries
    from adaecho.shards import TarShards as TarShards

__all__ = ["AdaScale", "EchoLoader", "IndexedTarShards", "Retries", "TarShards"]


def __getattr__(name: str) -> Any:
    room: Any
    if name == "AdaScale":
        import adaecho.adascale as room
    elif name == "EchoLoader":
        import adaecho.echo as room
    elif name in __all__:
        import adaecho.shards as room
    else:
        raise AttributeError(f"module 'adaecho' has no attribute {name!r}")
    return getattr(room, name)
