"""Would echoing help? Measures R, before any training or in one's own loop (``watch``)."""

from adaecho.headroom.own_loop import Watch as Watch
from adaecho.headroom.own_loop import watch as watch

__all__ = ["Watch", "watch"]
