"""Records in, figures out."""
