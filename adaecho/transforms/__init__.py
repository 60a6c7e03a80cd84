"""Image transforms for EchoLoader: decoding, crops, flips and color jitter.

The random numbers of a transform depend only on the seed, the example and the number of its repeat. The
result is therefore the same for any number of workers.
"""
