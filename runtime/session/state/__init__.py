"""What a session keeps of its rows beside the cache: a file is an observer."""
