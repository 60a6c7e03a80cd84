"""Storage of examples in memory."""
