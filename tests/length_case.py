"""What lengths are told."""

import numpy as np

from accel.ir.trained import Tensors
from accel.runtime.length._of_rounds import OfRounds
from accel.runtime.tree import Level


def one(token: int, number: int = 0) -> Level:
    """A token of a chain, after so many others of the draft."""
    return Level(np.array([token]), np.array([number]))


def by_the_first(of: OfRounds) -> Tensors:
    """A head that goes by the first number that it reads, a chance's logarithm: a half is an even chance for it."""
    found = {name: np.zeros(size, np.float32) for name, size in of.sizes(1).items()}
    found["first"][0] = found["last"][0] = -1
    found["last.bias"][:] = np.log(2)
    return found
