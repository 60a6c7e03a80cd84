"""Sweeps: compare several arms, each tuned by quasi-random search, with workers that share only a folder."""
