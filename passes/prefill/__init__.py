"""Methods on a prompt before the first token: fewer tokens, or fewer keys per token."""
