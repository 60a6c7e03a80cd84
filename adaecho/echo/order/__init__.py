"""The order in which examples are read, repeated and shuffled, computed from the seed."""
