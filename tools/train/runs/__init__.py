"""Kinds of training: a file each (`run.Kind`). There is no registry."""
