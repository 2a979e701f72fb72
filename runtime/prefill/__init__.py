"""Prompts on the host: how the work of one is shared."""
