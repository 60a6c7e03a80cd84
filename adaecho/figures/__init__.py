"""Draw figures of experiments from their recorded results, and write a report."""
