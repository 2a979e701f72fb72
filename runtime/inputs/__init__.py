"""User input: token ids, text, prompts, encoder inputs."""
