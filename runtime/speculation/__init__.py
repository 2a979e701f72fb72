"""What drafters and loops share: whether drafts pay, how likely they stand, a draft model that follows."""
