"""Template: its published rule, and what it must hold beyond the laws of its axis."""

import pytest

from accel.runtime.loop.template import Template

from ...diffusion_case import Case, guess_of, surest

# Options, and which slots of a block a call fills: the published rule, by what `Seen` says, not by the loop's own code
CASES = [Case({}, surest(1))]


def test_what_the_paper_claims():
    """Name the section; say which wrong version this fails for."""
    kept = Template().stays(guess_of([0.5, 0.9]), None)
    pytest.fail(f"write what must stay of masks of these probabilities, for {kept} does")
