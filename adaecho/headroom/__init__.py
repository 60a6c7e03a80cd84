"""Measure whether training is input-bound, and so whether echoing would help."""

from adaecho.headroom.loop_timer import Watch as Watch
from adaecho.headroom.loop_timer import watch as watch

__all__ = ["Watch", "watch"]
