"""Architectures that no library has: small models in plain PyTorch, to be captured like any other."""
