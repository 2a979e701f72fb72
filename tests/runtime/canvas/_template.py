"""Template: which slots its calls compute, and what it must hold beyond the laws of its axis."""

import numpy as np
import pytest

from accel.runtime.canvas import Sheet
from accel.runtime.canvas.template import Template

from ...diffusion_case import Fed


def plainly(before):
    """Which slots [W] the next call of a row computes: the published rule, not the method's own code."""
    return np.arange(before.open.size) >= (before.first - before.shift if before.step else 0)


CASES = [Fed({}, lambda: plainly)]


def test_what_the_paper_claims():
    """Name the section; say which wrong version this fails for."""
    masks, age = np.array([False, True, True, True]), np.array([3, 0, 0, 0])
    fed = Template().feeds(Sheet(1, 2, 4, masks, age, 0))
    pytest.fail(f"write which slots of this row a call must compute, for {fed} does")
