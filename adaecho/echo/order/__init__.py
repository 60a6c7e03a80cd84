"""What comes next: keyed draws, permutations, factors, shuffle buffers. No data and no threads."""
