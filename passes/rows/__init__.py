"""Layers that compute some rows of a call."""
