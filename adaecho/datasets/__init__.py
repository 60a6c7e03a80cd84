"""Stored data sets, from files to arrays or sources."""
