"""Data echoing and AdaScale for PyTorch.

* ``EchoLoader`` is a DataLoader that repeats each example it reads.
* ``TarShards`` reads examples from tar archives, for an ``EchoLoader``.
* ``AdaScale`` is an optimizer that adapts the learning rate to larger batches.

These classes work in any training loop. The subpackages also contain a framework that reproduces "Faster
Neural Network Training with Data Echoing" (Choi, Passos, Shallue, Dahl 2019).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaecho.adascale import AdaScale as AdaScale
    from adaecho.echo import EchoLoader as EchoLoader
    from adaecho.shards import TarShards as TarShards

__all__ = ["AdaScale", "EchoLoader", "TarShards"]
_PACKAGES = {"AdaScale": "adascale", "EchoLoader": "echo", "TarShards": "shards"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'adaecho' has no attribute {name!r}")
    return getattr(import_module(f"adaecho.{_PACKAGES[name]}"), name)
