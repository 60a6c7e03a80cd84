"""AdaScale: learning rates that follow the gradient variance."""

from adaecho.adascale.optimizer import AdaScale as AdaScale
from adaecho.adascale.optimizer import AdaScaleWrapper as AdaScaleWrapper

__all__ = ["AdaScale", "AdaScaleWrapper"]
