"""Benchmarks of speed. Each runs as a module from the checkout, and has its results in a JSON file."""
