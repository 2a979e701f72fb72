"""Other ways to run prompts: a file is an observer."""
