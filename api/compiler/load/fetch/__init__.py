"""Models that people know, fetched into the user's cache as pinned."""
