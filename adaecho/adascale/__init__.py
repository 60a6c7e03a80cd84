"""AdaScale: learning rates that follow the gradient variance."""

from adaecho.adascale.optimizer import AdaScale as AdaScale

__all__ = ["AdaScale"]
