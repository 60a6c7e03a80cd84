"""Would echoing help? Measures R before any training."""
