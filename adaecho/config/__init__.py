"""The typed config of a run, and checks of its values."""
