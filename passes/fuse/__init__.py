"""Fewer, larger operators: the same numbers in fewer steps."""
