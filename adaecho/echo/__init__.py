"""EchoLoader: data echoing as a drop-in for torch.utils.data.DataLoader.

Importing this imports no torch until the class is touched: ``echo.variants`` is for configs too.
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
