"""The order of examples: random numbers, permutations and the stream."""
