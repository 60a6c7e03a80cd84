"""Where examples come from: sources, with random access or read in sequence, and bad examples among them."""
