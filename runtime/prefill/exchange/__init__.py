"""How ranks that share a prompt exchange what they computed."""
