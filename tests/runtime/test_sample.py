"""Samplers: the distribution of each one's reference, draws that follow it, wrong options refused."""

import math
import time

import numpy as np
import pytest

from accel.ir.axis import Axis
from accel.ir.errors import AccelError, InputError
from accel.runtime.sample.standard import Standard

from ..references import reference

AXIS = Axis("sample", "accel.runtime.sample")


CASES = [(name, options) for name in AXIS.names() for options in reference("sample", name).OPTIONS]


def ours(logits, seen, o):
    """Probabilities [V] of a sampler."""
    return o.distribution(logits, seen).dense(logits.size)


def law_distribution(name, options, size=5000, seed=0, sampler=ours):
    o = AXIS.build(name, **options)
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(size) * 3).astype(np.float32)
    seen = rng.integers(0, size, 50)
    before = logits.copy()
    got, want = sampler(logits, seen, o), reference("sample", name).probabilities(logits, seen, o)
    assert np.array_equal(logits, before), "logits are not the sampler's to change"
    assert np.array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_distribution_is_that_of_its_reference(name, options):
    for seed in range(3):
        law_distribution(name, options, seed=seed)


def test_the_law_catches_another_order():
    def top_p_before_temperature(logits, seen, o):
        first = Standard(1.0, top_p=o.top_p).filtered(logits)[0]
        out = np.zeros(logits.size)
        out[first] = np.exp((logits[first] - logits[first].max()) / o.temperature)
        return out / out.sum()

    with pytest.raises(AssertionError):
        law_distribution(
            "standard", {"temperature": 2.0, "top_p": 0.9}, sampler=top_p_before_temperature
        )


def test_top_p_among_equals():
    flat = np.zeros(1000, np.float32)
    assert Standard(1.0, top_p=0.25).filtered(flat)[0].tolist() == list(range(250))
    assert Standard(1.0, top_p=1e-12).filtered(flat)[0].tolist() == [0]


def test_equals_of_the_last_of_top_k_stay():
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    assert Standard(1.0, top_k=2).filtered(logits)[0].tolist() == [1, 2, 3]


@pytest.mark.few(6)
@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_draws_follow_the_distribution(name, options):
    sampler = AXIS.build(name, **options)
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5], np.float32)
    want = sampler.distribution(logits, np.zeros(0, np.int64)).dense(5)
    rng = np.random.default_rng(5)
    draws = [sampler(logits, np.zeros(0, np.int64), rng) for _ in range(8_000)]
    got = np.bincount(draws, minlength=5) / 8_000
    assert np.abs(got - want).max() < 0.025
    if np.ptp(want) > 0.1:
        assert np.abs(got - np.roll(want, 1)).max() > 0.025, "the control"


def test_greedy():
    logits = np.array([1, 3, 3, 2], np.float32)
    seen, rng = np.array([1, 2]), np.random.default_rng(0)
    assert Standard()(logits, seen, rng) == 1, "the lowest id among equals"
    assert Standard(repetition_penalty=2.0)(logits, seen, rng) == 3
    assert Standard(repetition_penalty=3.0)(-logits, np.array([0]), rng) == 3, (
        "negative ones are multiplied"
    )
    said = Standard(presence_penalty=0.5, frequency_penalty=0.25, start=1)
    assert said.scores(logits, np.array([3, 1, 1, 0])).tolist() == [0.25, 2, 3, 2]
    assert said(logits, np.array([1, 3]), rng) == 1, "a prompt does not count"


def test_a_draft_model_may_lack_tokens_that_were_seen():
    """Penalties are of those that it has."""
    logits, seen = np.array([1, 3, 2], np.float32), np.array([1, 7, 1, 9])
    for sampler in (Standard(repetition_penalty=2.0), Standard(frequency_penalty=1.0)):
        assert sampler.scores(logits, seen).argmax() == 2


class Counted:
    """A generator that knows how many numbers were taken."""

    def __init__(self, seed=0):
        self.rng, self.taken = np.random.default_rng(seed), 0

    def random(self):
        self.taken += 1
        return self.rng.random()


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_a_draw_takes_one_number_and_goes_by_the_sum_of_what_comes_before(name, options):
    sampler, rng = AXIS.build(name, **options), Counted()
    logits = (np.random.default_rng(1).standard_normal(50) * 2).astype(np.float32)
    law = sampler.distribution(logits, np.array([3]))
    assert law.random and (np.diff(law.tokens) > 0).all()
    mass = law.weights.astype(np.float64).cumsum()
    for u in np.random.default_rng(0).random(20):
        want = law.tokens[(mass <= u * mass[-1]).sum()]
        assert sampler(logits, np.array([3]), rng) == want
    assert rng.taken == 20


def test_greedy_takes_no_number():
    rng, logits = Counted(), np.array([1, 3, 3, 2], np.float32)
    law = Standard().distribution(logits, np.zeros(0, np.int64))
    assert (Standard()(logits, np.zeros(0, np.int64), rng), rng.taken) == (1, 0)
    assert (law.dense(4).tolist(), law.of(1), law.of(2)) == ([0, 1, 0, 0], 1.0, 0.0)


def test_probabilities_of_single_tokens():
    law = Standard(1.0, top_k=2).distribution(
        np.log([1, 6, 2, 1]).astype(np.float32), np.zeros(0, int)
    )
    assert [law.of(t) for t in (-1, 0, 1, 2, 3, 4)] == pytest.approx([0, 0, 0.75, 0.25, 0, 0])


def test_seeds_reproduce():
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    none = np.zeros(0, np.int64)

    def draw(seed):
        rng = np.random.default_rng(seed)
        return [Standard(1.0)(logits, none, rng) for _ in range(20)]

    assert draw(3) == draw(3) != draw(4)


def test_logits_that_are_no_numbers():
    rng, none = np.random.default_rng(0), np.zeros(0, np.int64)
    for logits in ([math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [-math.inf, -math.inf]):
        for sampler in (Standard(), Standard(1.0), Standard(1.0, top_k=1, top_p=0.5, min_p=0.5)):
            with pytest.raises(AccelError, match="not numbers"):
                sampler(np.array(logits, np.float32), none, rng)


def test_extremes_that_are_numbers():
    rng, none = np.random.default_rng(0), np.zeros(0, np.int64)
    logits = np.array([-math.inf, 1e30, -1e30, 1e30], np.float32)
    for temperature in (1e-300, 1e-3, 1.0, 1e300):
        assert Standard(temperature, top_p=0.9)(logits, none, rng) in (1, 3)
    assert Standard(1e-40)(np.array([1, 1.0001], np.float32), none, rng) == 1


BAD = {
    "temperature": [-1, math.nan, math.inf, "1", None, True],
    "top_k": [0, -1, 1.5, "3", True],
    "top_p": [0, 0.0, -0.1, 1.1, math.nan, "x"],
    "min_p": [-0.1, 1.1, math.nan, []],
    "repetition_penalty": [0, -1, math.inf, math.nan, None],
    "presence_penalty": [-2.1, 3, math.nan, None, "1", True],
    "frequency_penalty": [2.5, -math.inf, None],
}


@pytest.mark.parametrize("name, value", [(n, v) for n, vs in BAD.items() for v in vs], ids=str)
def test_options_out_of_range(name, value):
    with pytest.raises(InputError, match=f"{name} = .* out of range; give a value"):
        Standard(**{name: value})


def test_options_at_their_ends():
    Standard(0, 1, 1, 0, 1)
    Standard(np.float32(0.5), np.int64(5), np.float64(0.5), 1.0, 0.1)


def test_a_large_vocabulary_is_quick():
    logits = (np.random.default_rng(0).standard_normal(150_000) * 4).astype(np.float32)
    sampler, rng, none = Standard(0.8, top_p=0.95), np.random.default_rng(0), np.zeros(0, np.int64)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        sampler(logits, none, rng)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
