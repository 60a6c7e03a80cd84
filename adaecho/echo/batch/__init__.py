"""From examples to batches: augmentation, the echo of examples and of batches, the way to the device."""
