"""Samplers: the distribution that each one's test file writes down, draws that follow it, and exact speculation."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import accel
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError
from accel.runtime.sample import Distribution
from accel.runtime.sample.standard import Standard
from accel.runtime.sample.typical import Typical
from accel.runtime.verify import Target

from ..sample_case import AXIS, own
from ..verify_case import World, gap

AXES = find_axes()
NONE = np.zeros(0, np.int64)
REQUESTS = [
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=50, repetition_penalty=1.3),
    dict(temperature=1.5, top_p=0.9, min_p=0.01, frequency_penalty=0.5),
]
SIZE = 400


CASES = [(name, options) for name in AXIS.names() for options in own(name).OPTIONS]


class Breaks(Typical):
    """A sampler that drops a token, for controls."""

    def reshape(self, law, seen):
        found = super().reshape(law, seen)
        return Distribution(found.tokens[1:], found.weights[1:])


def law_distribution(sampler, probabilities, seed=0):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(SIZE) * 3).astype(np.float32)
    seen, before = rng.integers(0, SIZE, 50), logits.copy()
    for request in REQUESTS:
        asked = replace(sampler, **request)
        left = replace(Standard(), **request).distribution(logits, seen)
        law = asked.distribution(logits, seen)
        want = probabilities(left.dense(SIZE), asked)
        assert np.array_equal(logits, before), "logits are not the sampler's to change"
        assert law.random and (np.diff(law.tokens) > 0).all() and (law.weights >= 0).all()
        assert abs(law.probabilities.sum() - 1) < 1e-12
        got = law.dense(SIZE)
        assert np.array_equal(got > 0, want > 0)
        np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_the_distribution_is_the_published_one(name, options):
    for seed in range(2):
        law_distribution(AXIS.build(name, **options), own(name).probabilities, seed)


def test_the_law_of_distributions_catches_a_token_too_few():
    with pytest.raises(AssertionError):
        law_distribution(Breaks(), own("typical").probabilities)


def test_the_law_of_a_method_without_a_published_form_fails():
    with pytest.raises(pytest.fail.Exception, match="lacks OPTIONS or probabilities"):
        own("no-such-method")


# Draws


CHI = 27.9  # of 9 degrees of freedom, less than one in a thousand


def chi_square(sampler, count=3000):
    """How far draws are from the distribution; infinite where one comes that it does not have."""
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5, 1.9, -3.0, -0.5, 0.2, 1.2], np.float32)
    want = sampler.distribution(logits, NONE).dense(10) * count
    rng = np.random.default_rng(5)
    got = np.bincount([sampler(logits, NONE, rng) for _ in range(count)], minlength=10)
    if got[want == 0].any():
        return math.inf
    some = want > 0
    return float(((got - want)[some] ** 2 / want[some]).sum())


@pytest.mark.parametrize("name", AXIS.names())
def test_draws_follow_the_distribution(name):
    assert chi_square(AXIS.build(name, temperature=1.0, **own(name).OPTIONS[0])) < CHI


def test_the_law_of_draws_catches_what_is_drawn_from_another_distribution():
    @dataclass(frozen=True)
    class Hotter(Typical):
        def __call__(self, logits, seen, rng):
            return super().__call__(logits * np.float32(0.8), seen, rng)

    @dataclass(frozen=True)
    class Uncut(Typical):
        def __call__(self, logits, seen, rng):
            return Standard(1.0)(logits, seen, rng)

    assert chi_square(Hotter(1.0)) > CHI and chi_square(Uncut(1.0, mass=0.5)) > CHI


class Counted:
    """A generator that knows how many numbers were taken."""

    def __init__(self, seed=0):
        self.rng, self.taken = np.random.default_rng(seed), 0

    def random(self):
        self.taken += 1
        return self.rng.random()


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_a_draw_takes_one_number_and_goes_by_the_sum_of_what_comes_before(name, options):
    sampler, rng = AXIS.build(name, temperature=1.0, **options), Counted()
    logits = (np.random.default_rng(1).standard_normal(50) * 2).astype(np.float32)
    law = sampler.distribution(logits, np.array([3]))
    mass = law.weights.astype(np.float64).cumsum()
    for u in np.random.default_rng(0).random(20):
        want = law.tokens[(mass <= u * mass[-1]).sum()]
        assert sampler(logits, np.array([3]), rng) == want
    assert rng.taken == 20


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_greedy_is_not_touched_and_a_temperature_near_0_is_greedy(name, options):
    rng = Counted()
    for seed in range(5):
        logits = np.random.default_rng(seed).standard_normal((3, 200)).astype(np.float32)
        best = logits.argmax(-1).tolist()
        cold = AXIS.build(name, **options)
        assert cold.greedy and cold.choices(logits).tolist() == best
        for row, token in zip(logits, best, strict=True):
            assert cold(row, NONE, rng) == token and rng.taken == 0
            near = replace(cold, temperature=1e-6).distribution(row, NONE)
            assert near.of(token) > 1 - 1e-6


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_logits_that_are_no_numbers_and_extremes_that_are(name, options):
    sampler, rng = AXIS.build(name, temperature=1.0, **options), np.random.default_rng(0)
    for logits in ([math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]):
        with pytest.raises(AccelError, match="not numbers"):
            sampler(np.array(logits, np.float32), NONE, rng)
    logits = np.array([-math.inf, 1e30, -1e30, 1e30], np.float32)
    for temperature in (1e-300, 1e-3, 1.0, 1e300):
        law = replace(sampler, temperature=temperature).distribution(logits, NONE)
        assert np.isfinite(law.probabilities).all() and law.of(0) == 0
        assert replace(sampler, temperature=temperature)(logits, NONE, rng) in (1, 2, 3)
    only = np.array([-math.inf, 2.0, -math.inf], np.float32)
    assert sampler(only, NONE, rng) == 1, "as a grammar leaves one token"


# Speculation


EXACT = [n for n in AXES["verify"].names() if AXES["verify"].method(n).grade != "approximate"]


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("name", AXIS.names())
def test_drafts_change_no_probability(rule, name):
    """Of three tokens, over all random choices of a rule that promises it."""
    options = own(name).OPTIONS[0]
    sampler, rule = AXIS.build(name, temperature=1.0, **options), AXES["verify"].build(rule)
    assert gap(rule, World(sampler, "other"), (-1, 0)) < 1e-9


def test_the_law_of_drafts_catches_a_rule_that_goes_by_another_distribution(monkeypatch):
    """The control: what the request's options leave, before its sampler changes it."""
    world, rule = World(Typical(1.0, mass=0.3), "other"), AXES["verify"].build("spec-chain")
    assert gap(rule, world, (-1, 0)) < 1e-9

    def law(self, node):
        logits, seen = self._logits[node + 1], self._seen(node)
        return Standard(1.0).distribution(logits, seen)

    monkeypatch.setattr(Target, "law", law)
    assert gap(rule, world, (-1, 0)) > 1e-3


def test_every_method_has_a_recipe_or_is_the_default():
    used = {
        accel.Recipe.load(path).tables["sample"]["use"]
        for path in (Path(__file__).parents[2] / "recipes" / "sampling").glob("[!_]*.toml")
    }
    assert used | {"standard"} == set(AXIS.names())
