"""Train one run, from its config to its summary."""
