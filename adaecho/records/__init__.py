"""Read and write the records of runs, mirror them to W&B, and collect them into tables."""
