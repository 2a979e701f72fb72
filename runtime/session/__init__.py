"""Sessions: a KV cache per row, and calls that add to it."""
