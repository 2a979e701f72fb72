"""Decisions on the host about the KV cache: how many tokens to keep, and when to evict."""
