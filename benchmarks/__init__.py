"""Measurements of speed. Each has a committed record, and runs as a module from the checkout."""
