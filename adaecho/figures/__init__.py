"""Figures and a report from records."""
