"""What a session keeps beside its cache; each feature is an observer of its calls."""
