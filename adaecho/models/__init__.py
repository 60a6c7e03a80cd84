"""Models that no library offers in the form that the paper uses."""
