"""Quasi-random search: a design by index, workers, Hydra's sweeper, an export for Optuna."""
