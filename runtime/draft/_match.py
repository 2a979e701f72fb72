"""Where tokens occur in others."""

from __future__ import annotations

import numpy as np

from accel.runtime.ints import Ints


def ends(tokens: Ints, tail: Ints) -> Ints:
    """The index behind each occurrence of tail [n], n >= 1, in tokens [m], in rising order."""
    if tail.size > tokens.size:
        return np.zeros(0, np.int64)
    last = np.flatnonzero(tokens[tail.size - 1 :] == tail[-1])  # of most tails nothing else has to be compared
    for back in range(1, tail.size):
        last = last[tokens[last + tail.size - 1 - back] == tail[-1 - back]]
    return last + tail.size
