"""Image transforms for EchoLoader: decoding, crops, flips and color jitter.

The random numbers depend only on the seed, the example, and how often the example was repeated before.
"""
