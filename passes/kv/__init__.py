"""KV-cache methods: which tokens are kept, how they are stored, which of them a step reads."""
