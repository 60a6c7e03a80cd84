"""Draw figures and write a report from the records of experiments."""
