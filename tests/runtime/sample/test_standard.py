"""The options of requests: the distribution of transformers' own processors, in the order of its `generate`; draws;
wrong options refused. Penalties that transformers does not have go by OpenAI's formula, `mu[j] -= c[j] * frequency +
(c[j] > 0) * presence`, c[j] of the tokens behind the prompt.
"""

import math
import time

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from accel.ir.errors import AccelError, InputError
from accel.runtime.sample.standard import Standard

OPTIONS = [{}]
REQUESTS = [
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=50),
    dict(temperature=1.5, top_p=0.9),
    dict(temperature=0.3, top_p=0.95),
    dict(temperature=30.0, top_p=0.99),
    dict(temperature=1.0, min_p=0.05),
    dict(temperature=1.0, min_p=0.0),
    dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
    dict(temperature=1.2, repetition_penalty=0.5),
    dict(temperature=0.9, presence_penalty=1.5, frequency_penalty=-0.75, start=20),
    dict(temperature=1.1, repetition_penalty=1.4, presence_penalty=-2, frequency_penalty=0.5),
    dict(temperature=1.0, top_k=1),
    dict(temperature=1.0, top_k=10**6, top_p=1.0),
    dict(temperature=0.01, top_p=1e-9),
]


def probabilities(p, o):
    """[V]: those that the request's options leave."""
    return p


def published(logits, seen, o):
    """Probabilities [V] of a request's options `o` and the tokens `seen` so far."""
    scores = torch.from_numpy(logits.copy())[None]
    ids = torch.from_numpy(seen)[None]
    steps = []
    if o.repetition_penalty != 1.0:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(float(o.repetition_penalty)))
    steps += [_penalties(o), hf.TemperatureLogitsWarper(float(o.temperature))]
    if o.top_k:
        steps.append(hf.TopKLogitsWarper(o.top_k))
    if o.top_p is not None and o.top_p < 1:
        steps.append(hf.TopPLogitsWarper(o.top_p))
    if o.min_p is not None:
        steps.append(hf.MinPLogitsWarper(o.min_p))
    for step in steps:
        scores = step(ids, scores)
    return scores.softmax(-1)[0].numpy()


def _penalties(o):
    def lowered(ids, scores):
        counts = torch.bincount(ids[0, o.start :], minlength=scores.shape[1])
        return scores - counts * o.frequency_penalty - (counts > 0) * o.presence_penalty

    return lowered


def law_distribution(options, seed=0, sampler=None):
    o = Standard(**options)
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(5000) * 3).astype(np.float32)
    seen = rng.integers(0, 5000, 50)
    got = sampler(logits, o) if sampler else o.distribution(logits, seen).dense(logits.size)
    want = published(logits, seen, o)
    assert np.array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("options", REQUESTS, ids=str)
def test_the_options_of_a_request_mean_what_they_mean_in_transformers(options):
    for seed in range(3):
        law_distribution(options, seed)


def test_the_law_catches_another_order():
    def top_p_before_temperature(logits, o):
        first = Standard(1.0, top_p=o.top_p).filtered(logits)[0]
        out = np.zeros(logits.size)
        out[first] = np.exp((logits[first] - logits[first].max()) / o.temperature)
        return out / out.sum()

    with pytest.raises(AssertionError):
        law_distribution({"temperature": 2.0, "top_p": 0.9}, sampler=top_p_before_temperature)


def test_top_p_among_equals():
    flat = np.zeros(1000, np.float32)
    assert Standard(1.0, top_p=0.25).filtered(flat)[0].tolist() == list(range(250))
    assert Standard(1.0, top_p=1e-12).filtered(flat)[0].tolist() == [0]


def test_equals_of_the_last_of_top_k_stay():
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    assert Standard(1.0, top_k=2).filtered(logits)[0].tolist() == [1, 2, 3]


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
