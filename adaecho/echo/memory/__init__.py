"""Stacks and pools of examples."""
