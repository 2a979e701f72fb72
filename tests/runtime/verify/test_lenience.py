"""Lenience: the law of what comes, its bound, and that 1 is speculative sampling."""

import itertools

import numpy as np
import pytest

from accel.ir.errors import RecipeError
from accel.runtime.verify import Chance
from accel.runtime.verify.lenience import Lenience

from ...laws.test_verify import SAMPLERS
from ...verify_case import AXIS, CHAINS, DRAFTS, World, gap, outcomes, sampled

WORLDS = [World(s, d, seed) for s, d, seed in itertools.product(SAMPLERS.values(), DRAFTS, (0, 1))]


def first(rule, world):
    """The law of the first token [V] of a round with one drafted token, by enumeration."""
    found = np.zeros(world.size)
    for tokens, weight in outcomes(lambda chance: world.round(rule, (-1,), (), chance)).items():
        found[tokens[0]] += weight
    return found


def by_hand(world, lenience, left):
    """The same by the formula; `left`: how much of q is taken from p where a token was rejected."""
    p, q = world.law(()).dense(world.size), world.q(()).astype(np.float64)
    if world.draft == "chosen":
        q = (q == q.max()).astype(np.float64)
    stays = np.minimum(q, p / lenience)
    over = np.maximum(p - left * q, 0)
    return stays + (1 - stays.sum()) * (over / over.sum() if over.any() else p)


@pytest.mark.parametrize("lenience", [0.1, 0.5, 0.9])
def test_tokens_have_the_law_of_the_formula(lenience):
    """And none more than 1 / l times the target's probability. The control: the residual of plain p and q."""
    off = 0.0
    for world in WORLDS:
        if not world.law(()).random:
            continue
        found, p = first(Lenience(lenience), world), world.law(()).dense(world.size)
        assert np.abs(found - by_hand(world, lenience, lenience)).max() < 1e-7, world
        assert (found <= p / lenience + 1e-9).all()
        off = max(off, np.abs(found - by_hand(world, lenience, 1.0)).max())
    assert off > 1e-3


def test_one_is_speculative_sampling_bit_for_bit():
    """And takes the same random numbers. The control: a little less is not."""
    rules = Lenience(1.0), AXIS.build("spec-chain")
    for world, parents, seed in itertools.product(WORLDS[::2], CHAINS, range(2)):
        found = []
        for rule in rules:
            rng = np.random.default_rng(seed)
            found.append((world.round(rule, parents, (), Chance(rng)), rng.random()))
        assert found[0] == found[1]
    world = World(sampled())
    assert gap(Lenience(1.0), world, (-1, 0)) < 1e-12 < gap(Lenience(0.9), world, (-1, 0))


def test_less_accepts_more():
    world = next(w for w in WORLDS if w.draft == "other" and w.law(()).random)
    p, q = world.law(()).dense(world.size), world.q(())
    accepted = [np.minimum(q, p / one).sum() for one in (1.0, 0.5, 0.1)]
    found = [
        sum(
            weight
            for tokens, weight in outcomes(
                lambda chance, one=one: world.round(Lenience(one), (-1,), (), chance)
            ).items()
            if len(tokens) == 2
        )
        for one in (1.0, 0.5, 0.1)
    ]
    assert found == pytest.approx(accepted, abs=1e-6) and found == sorted(found)
    assert found[0] < found[-1]


@pytest.mark.parametrize("lenience", [0.0, 1.5, -1.0])
def test_what_is_no_share_is_refused(lenience):
    with pytest.raises(RecipeError, match="lenience"):
        Lenience(lenience)
