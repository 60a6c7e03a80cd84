"""Speed benchmarks. Each runs as a module from the checkout and writes its results to a JSON file."""
