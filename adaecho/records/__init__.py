"""Run folders, their mirrors, and the tables collected from them."""
