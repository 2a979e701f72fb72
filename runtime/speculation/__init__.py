"""Shared by drafters and loops: the guard, acceptance statistics, the session of a draft model."""
