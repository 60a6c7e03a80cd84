"""Image transforms for EchoLoader, keyed to each example: decoding, crops, flips and colours."""
