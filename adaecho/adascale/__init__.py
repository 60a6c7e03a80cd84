"""AdaScale: multiply the learning rate by a gain that is computed from the variance of the gradients."""

from adaecho.adascale.optimizer import AdaScale as AdaScale

__all__ = ["AdaScale"]
