"""Quasi-random search: a design by index, workers, Hydra's sweeper, Optuna's mirror."""
