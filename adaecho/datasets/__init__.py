"""Find and read stored data sets, and return arrays or sources of examples."""
