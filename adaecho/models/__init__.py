"""Models that no library offers in the paper's form."""
