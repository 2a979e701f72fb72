"""The tolerant rule of SpecDec and GAD++: what stands, that it is monotone, and that one best is greedy decoding."""

import itertools
import math

import numpy as np
import pytest

from accel.ir.errors import RecipeError
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import Tree
from accel.runtime.verify import Chance, Target
from accel.runtime.verify.top_beta import TopBeta

from ...laws.test_verify import SAMPLERS
from ...verify_case import AXIS, DRAFTS, World, gap, sampled

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((200, 8, 6)).astype(np.float32) * 2
TOKENS = RNG.integers(0, 6, (200, 7))


def paths(rule, sampler=Standard()):  # noqa: B008  (frozen)
    """The accepted paths of random chains, and the tokens that follow."""
    found = []
    for logits, tokens in zip(LOGITS, TOKENS, strict=True):
        target = Target(Tree.chain(tokens), logits, np.zeros(0, np.int64), sampler)
        found.append(rule(target, Chance(np.random.default_rng(0))))
    return found


def test_every_token_is_among_the_best_and_near_and_what_follows_is_the_target_s():
    rule, stood = TopBeta(beta=3, tau=1.5), 0
    for verdict, logits, tokens in zip(paths(rule), LOGITS, TOKENS, strict=True):
        length = len(verdict.path)
        odds = logits - np.log(
            np.exp(logits).sum(1, keepdims=True)
        )  # log-probabilities say the same
        ok = [
            odds[i].max() - odds[i, t] <= 1.5 and (odds[i] > odds[i, t]).sum() < 3
            for i, t in enumerate(tokens)
        ]
        assert all(ok[:length]) and not any(ok[length : length + 1])
        assert verdict.token == logits[length].argmax()
        stood += length
    assert stood > 100


def test_more_is_accepted_of_a_larger_beta_or_tau():
    found = {
        (beta, tau): [len(v.path) for v in paths(TopBeta(beta, tau))]
        for beta, tau in itertools.product((1, 2, 5), (0.0, 1.0, 3.0))
    }
    for (beta, tau), lengths in found.items():
        for (more, wider), others in found.items():
            if more >= beta and wider >= tau:
                assert all(a <= b for a, b in zip(lengths, others, strict=True))
    assert sum(found[5, 3.0]) > 2 * sum(found[1, 0.0]) > 0
    assert found[1, 3.0] == found[1, 0.0] == found[5, 0.0]


@pytest.mark.parametrize("draft", DRAFTS)
def test_one_best_is_greedy_decoding_whatever_is_drafted(draft):
    assert gap(TopBeta(beta=1, tau=9.0), World(Standard(), draft), (-1, -1, 0)) < 1e-12


def test_penalties_and_filters_count():
    penalty, seen = SAMPLERS["penalty"], np.zeros(1, np.int64)
    logits = np.log(np.array([[0.5, 0.4, 0.1]] * 2, np.float32)) + 3
    for token, sampler, stands in (
        (0, Standard(), True),
        (0, Standard(repetition_penalty=penalty.repetition_penalty), False),
        (1, sampled(), True),
        (1, sampled(top_k=1), False),
    ):
        target = Target(Tree.chain([token]), logits, seen, sampler)
        rule = TopBeta(beta=2, tau=0.5)
        assert bool(rule(target, Chance(np.random.default_rng(0))).path) == stands


@pytest.mark.parametrize(
    "options", [{"beta": 0}, {"tau": -1.0}, {"tau": math.nan}, {"tau": math.inf}]
)
def test_options(options):
    (name,) = options
    with pytest.raises(RecipeError, match=f"top-beta: {name} is {options[name]}; give"):
        AXIS.build("top-beta", **options)
