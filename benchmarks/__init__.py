"""Measurements of speed, each with a committed record; run as modules from the checkout."""
