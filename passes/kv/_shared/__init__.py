"""What the passes over the KV cache share."""
