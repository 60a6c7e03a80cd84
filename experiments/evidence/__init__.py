"""Decide the paper's claims from this repository's records. This is not part of the package adaecho."""
