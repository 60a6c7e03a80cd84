"""AdaScale: learning rates that follow the gradient variance."""
