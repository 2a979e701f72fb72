"""Probabilities by another implementation, for OPTIONS."""

import pytest

OPTIONS = [{}]


def probabilities(logits, seen, o):
    """[V], of a sampler's options `o` and the tokens `seen` so far."""
    pytest.fail("write the published distribution here, not by the sampler's own code")
