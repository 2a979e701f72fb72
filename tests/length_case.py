"""What lengths are told."""

import numpy as np

from accel.runtime.tree import Level


def one(token: int, number: int = 0) -> Level:
    """A token of a chain, after so many others of the draft."""
    return Level(np.array([token]), np.array([number]))
