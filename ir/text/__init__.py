"""A program as text that people read (`write`), and the program that a text describes (`read`)."""
