"""Laws of how saved sessions store keys and values: what is read back is as near as a method promises, whatever the
numbers, and what is damaged is refused or as long as it was.
"""

import numpy as np
import pytest

from accel.ir.axis import find_axes
from accel.runtime.kv.file import Place

AXIS = find_axes()["kv.file"]
PLACES = [Place(layer, 8, keys) for layer in (0, 1, 4) for keys in (True, False)]


def numbers(seed):
    """Keys [B,G,S,D] whose channels and tokens differ in size; a token of zeros, an outlier, and tiny ones."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 3, 37, 8)) * np.exp(rng.standard_normal((1, 3, 1, 8)))
    x[0, :, 5], x[1, 2, 7, 3], x[:, :, 9] = 0, 3e4, x[:, :, 9] * 1e-30
    return x.astype(np.float32)


def law(method):
    for place in PLACES:
        for seed, cut in enumerate((37, 1)):
            x = np.ascontiguousarray(numbers(seed)[:, :, :cut])
            parts = method.encode(place, x)
            back = method.decode(place, parts, x.shape)
            assert back.shape == x.shape and back.dtype == np.float32
            assert (np.abs(back - x) <= method.bound(place, x)).all()
            again = method.encode(place, x)
            assert all(np.array_equal(parts[name], again[name]) for name in parts | again)
            assert sum(a.nbytes for a in parts.values()) < x.nbytes or cut == 1


@pytest.mark.parametrize("name", AXIS.names())
def test_law(name):
    law(AXIS.build(name, **AXIS.small(name)))


@pytest.mark.parametrize("name", AXIS.names())
def test_the_law_catches_what_is_half_as_near(name, monkeypatch):
    cls = AXIS.method(name)
    bound = cls.bound
    monkeypatch.setattr(cls, "bound", lambda self, place, x: bound(self, place, x) / 2)
    with pytest.raises(AssertionError):
        law(AXIS.build(name, **AXIS.small(name)))
