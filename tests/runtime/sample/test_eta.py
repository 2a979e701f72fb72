"""Eta sampling: transformers' distribution, and its bound beside epsilon's."""

import numpy as np
import pytest
from transformers.generation.logits_process import EtaLogitsWarper

from accel.runtime.sample import Distribution
from accel.runtime.sample.epsilon import Epsilon
from accel.runtime.sample.eta import Eta

from .warped import warped

OPTIONS = [{"epsilon": epsilon} for epsilon in (0.1, 3e-4, 2e-3, 0.6)]
NONE = np.zeros(0, np.int64)


def probabilities(p, o):
    return warped(p, EtaLogitsWarper(o.epsilon))


def kept(method, p):
    return set(method.reshape(Distribution(np.arange(p.size), p), NONE).tokens.tolist())


@pytest.mark.parametrize("epsilon", [1e-3, 0.05])
def test_it_keeps_no_less_than_epsilon_and_more_where_the_model_is_unsure(epsilon):
    rng, more = np.random.default_rng(0), 0
    for spread in (0.02, 0.2, 2.0):
        p = rng.dirichlet(np.full(2000, spread))
        ours, theirs = kept(Eta(epsilon=epsilon), p), kept(Epsilon(epsilon=epsilon), p)
        assert theirs <= ours
        more += ours != theirs
    assert more, "the entropy counts"


def test_of_a_certain_token_nothing_else_stays():
    assert kept(Eta(), np.array([0.0, 1.0, 0.0])) == {1}
