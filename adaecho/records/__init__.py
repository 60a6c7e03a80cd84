"""Run folders, their mirror in W&B, and the tables collected from them."""
