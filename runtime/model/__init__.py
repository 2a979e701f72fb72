"""A model that is ready to run: generate, stream, sessions."""
