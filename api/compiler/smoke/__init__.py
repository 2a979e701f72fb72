"""Small random models of any architecture, through every recipe and target."""
