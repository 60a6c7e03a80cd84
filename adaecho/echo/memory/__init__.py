"""How examples lie in memory: trees as columns, pools behind a buffer, memory used again, and what fits."""
