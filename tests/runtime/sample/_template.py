"""Template: its published distribution, and what it must hold beyond the laws of its axis."""

import numpy as np
import pytest

from accel.runtime.sample.template import Template

OPTIONS = [{"least": 0.1}, {"least": 0.5}]


def probabilities(p, o):
    """[V]: what the options `o` make of the probabilities p [V] that a request's own options leave. Write the published
    form, not by the sampler's own code.
    """
    kept = np.where(p >= o.least * p.max(), p, 0)
    return kept / kept.sum()


def test_what_the_paper_claims():
    """Name the section; say which wrong version this fails for."""
    method = Template()  # call `reshape` on numbers whose result is known
    pytest.fail(f"write what {method.full_name} must hold beyond the laws of its axis")
