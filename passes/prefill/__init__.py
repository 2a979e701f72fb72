"""What becomes of a prompt before the first token: fewer of its tokens, or fewer keys for each of them."""
