"""Evidence for the paper's claims from this repository's records; not part of the package."""
