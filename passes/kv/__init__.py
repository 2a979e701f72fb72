"""What a recipe does to the KV cache: which tokens stay, how they are stored, which of them a step reads."""
