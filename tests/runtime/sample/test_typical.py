"""Locally typical sampling: transformers' distribution, and the cases in which it differs from top-p."""

import numpy as np
from transformers.generation.logits_process import TypicalLogitsWarper

from accel.runtime.sample import Distribution, entropy
from accel.runtime.sample.typical import Typical

from .warped import warped

OPTIONS = [{"mass": mass} for mass in (0.2, 0.5, 0.9, 0.95, 0.999)]
NONE = np.zeros(0, np.int64)


def probabilities(p, o):
    return warped(p, TypicalLogitsWarper(o.mass))


def kept(p, mass):
    """The tokens that stay of probabilities."""
    p = np.array(p)
    return Typical(mass=mass).reshape(Distribution(np.arange(p.size), p), NONE).tokens.tolist()


def test_the_likeliest_token_falls_where_it_says_too_little():
    """Entropy 1.36: 0.3 is nearer to it than 0.5. Top-p would keep token 0."""
    p = [0.5, 0.26, 0.08, 0.08, 0.08]
    assert kept(p, 0.2) == [1] and kept(p, 0.5) == [0, 1]


def test_equals_stay_together_and_the_mass_is_reached():
    assert kept(np.full(1000, 1e-3), 0.3) == list(range(1000))
    rng = np.random.default_rng(0)
    for _ in range(20):
        p = rng.dirichlet(np.full(300, 0.2))
        for mass in (0.1, 0.7, 0.99):
            tokens = kept(p, mass)
            away = np.abs(-np.log(p) - entropy(p))
            assert p[tokens].sum() >= mass - 1e-12
            assert away[tokens].max() < np.delete(away, tokens).min(initial=np.inf)


def test_a_law_with_tokens_of_no_weight():
    assert kept([0.0, 0.5, 0.5], 0.9) == [1, 2]
