"""Sweeps: tune several configurations by quasi-random search, and compare their best results."""
