"""Epsilon sampling: transformers' distribution; the likeliest token stays."""

import numpy as np
from transformers.generation.logits_process import EpsilonLogitsWarper

from accel.runtime.sample import Distribution
from accel.runtime.sample.epsilon import Epsilon

from .warped import warped

OPTIONS = [{"epsilon": epsilon} for epsilon in (0.05, 3e-4, 9e-4, 0.9)]


def probabilities(p, o):
    return warped(p, EpsilonLogitsWarper(o.epsilon))


def kept(weights, epsilon):
    law = Distribution(np.arange(len(weights)), np.array(weights))
    return Epsilon(epsilon=epsilon).reshape(law, np.zeros(0, np.int64)).tokens.tolist()


def test_weights_are_not_taken_for_probabilities():
    """Weights [4, 3, 2, 1] are probabilities 0.4 to 0.1: unscaled, all would stay."""
    assert kept([4, 3, 2, 1], 0.25) == [0, 1] and kept([4, 3, 2, 1], 0.3) == [0, 1]


def test_the_likeliest_ones_stay_whatever_the_bound():
    assert kept([1, 2, 2, 1], 0.9) == [1, 2]
