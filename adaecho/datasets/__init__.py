"""Find and read stored datasets, and return arrays or sources of examples."""
