"""What this repository's own records say of the paper's claims; no part of the package."""
