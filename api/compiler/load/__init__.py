"""Models from Hugging Face directories: configuration, shards, weights."""
