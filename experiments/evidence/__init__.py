"""Decide whether the paper's claims hold, from the results in this repository. Not part of adaecho."""
