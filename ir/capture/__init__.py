"""From a module to a program: look, export, convert, check."""
