"""Measure whether the input pipeline limits the speed of training, in which case echoing may help."""

from adaecho.headroom.loop_timer import Watch as Watch
from adaecho.headroom.loop_timer import watch as watch

__all__ = ["Watch", "watch"]
