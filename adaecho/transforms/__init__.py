"""Image transforms for EchoLoader: decoding, crops, flips and color jitter.

The random numbers depend only on the seed, the example and the number of its repeat.
"""
