"""What is decided on numbers about the KV cache: how many tokens stay, and when."""
