"""Adapters around others' loaders and iterables; who reads only sources of their own never meets them."""
