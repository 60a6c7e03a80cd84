"""EchoLoader: data echoing as a drop-in for torch.utils.data.DataLoader."""

from adaecho.echo.loader import EchoLoader as EchoLoader

__all__ = ["EchoLoader"]
