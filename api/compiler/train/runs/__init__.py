"""Kinds of training: a file each (`kind.Kind`). There is no registry."""
