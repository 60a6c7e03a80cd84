"""EchoLoader: data echoing as a drop-in for torch.utils.data.DataLoader.

This package imports torch only when ``EchoLoader`` is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaecho.echo.loader import EchoLoader as EchoLoader

__all__ = ["EchoLoader"]


def __getattr__(name: str) -> Any:
    if name != "EchoLoader":
        raise AttributeError(f"module 'adaecho.echo' has no attribute {name!r}")
    from adaecho.echo.loader import EchoLoader

    return EchoLoader
