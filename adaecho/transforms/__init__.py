"""Image transforms for EchoLoader: decoding, crops, flips and colour jitter.

Their random numbers are keyed to each example and its repeat, so they do not depend on the number of workers.
"""
