"""What users give: token ids, texts, prompts, encoder inputs."""
