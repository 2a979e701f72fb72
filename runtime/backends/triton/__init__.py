"""Sessions on the Triton target."""
