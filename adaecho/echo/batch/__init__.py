"""Batches, and the functions and workers that make them."""
