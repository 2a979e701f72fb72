"""From a program to an FX graph of kernels."""
