"""Data echoing and AdaScale for PyTorch.

``EchoLoader``, ``AdaScale`` and ``TarShards`` can be used in any training loop. The other packages reproduce
"Faster Neural Network Training with Data Echoing" (Choi, Passos, Shallue, Dahl 2019).
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
