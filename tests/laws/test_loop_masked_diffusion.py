"""What loops that fill masks hold to: the published decoding, whatever is cached, and the same alone and in a batch."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch

import accel
from accel.ir.axis import Axis
from accel.runtime.loop._canvas import Canvas
from accel.runtime.loop.dllm_lowconf import DllmLowconf
from accel.runtime.loop.dllm_threshold import DllmThreshold
from accel.runtime.loop.freedave import Freedave
from accel.runtime.sample.standard import Standard

from ..diffusion_case import (
    BLOCK,
    MASK,
    NEW,
    VOCABULARY,
    Filler,
    decoded,
    driven,
    eager,
    guess_of,
    official,
    prompts,
    surest,
    with_loop,
)
from ..references import reference

AXIS = Axis("loop", "accel.runtime.loop")
FILLS = [name for name in AXIS.names() if AXIS.method(name).masked_diffusion]
CACHES = ("none", "prefix", "dual")


@pytest.fixture(scope="module")
def model():
    return cache(eager)


CASES = [(name, *case) for name in FILLS for case in reference("loop", name).CASES]


@pytest.mark.few(6)
@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "use, options, stays, early", CASES, ids=[f"{use} {more}" for use, more, *_ in CASES]
)
def test_tokens_are_those_of_the_published_loop(model, shift, cache, use, options, stays, early):
    module, compiled = model(shift)
    given = prompts()
    new = 24 if "steps" in options else NEW  # a last block of other size would take other counts
    wanted = [official(module, prompt, new, BLOCK, stays, cache, early) for prompt in given]
    tokens, calls, together = decoded(
        compiled, use, given, new, block=BLOCK, cache=cache, **options
    )
    assert tokens == [t for t, _ in wanted] == together
    if use == "freedave":
        assert all(got <= n for got, (_, n) in zip(calls, wanted, strict=True))
    else:
        assert calls == [n for _, n in wanted]


def test_caches_differ_where_they_may():
    """Or the comparison above would not see one taken for another."""
    module = Filler(False).eval()
    found = {
        str(official(module, p, NEW, BLOCK, surest(1), cache))
        for cache in CACHES
        for p in prompts()[:1]
    }
    assert len(found) == 3


@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_blocks_first_call_is_the_uncached_one(model, shift, cache):
    """All of a block at once: then nothing that is cached is read."""
    _, compiled = model(shift)
    same = decoded(compiled, "dllm-threshold", prompts(), block=BLOCK, threshold=0.0)
    assert (
        decoded(compiled, "dllm-blockcache", prompts(), block=BLOCK, threshold=0.0, cache=cache)
        == same
    )
    assert same[1] == [3, 3]


def test_extremes_of_each_option(model):
    module, compiled = model(False)
    static = decoded(compiled, "dllm-lowconf", prompts(), block=BLOCK)
    assert static[1] == [NEW, NEW]
    assert decoded(compiled, "dllm-threshold", prompts(), block=BLOCK, threshold=1.01) == static
    assert decoded(compiled, "dllm-lowconf", prompts(), block=BLOCK, steps=99) == static
    assert decoded(compiled, "freedave", prompts(), block=BLOCK, drafts=1) == static
    never = {"early": 1e30, "middle": 1e30, "late": 1e30}
    assert decoded(compiled, "prophet", prompts(), block=BLOCK, **never) == static
    at_once = {"early": -1.0, "middle": -1.0, "late": -1.0}
    tokens, calls, _ = decoded(compiled, "prophet", prompts(), block=BLOCK, **at_once)
    assert calls == [1, 1]
    one = decoded(compiled, "dllm-lowconf", prompts(), block=NEW, steps=1)
    x = torch.tensor([[*prompts()[0], *[MASK] * NEW]])
    scores = module(x)[0, -NEW:]
    scores[:, MASK] = -torch.inf
    assert tokens == one[0] and tokens[0] == scores.argmax(-1).tolist()


def test_blocks_of_one_are_filled_from_left_to_right(model, monkeypatch):
    _, compiled = model(False)
    filled = []
    own = Canvas.commit
    monkeypatch.setattr(
        Canvas, "commit", lambda *a: filled.extend(a[2].slots[a[3]].tolist()) or own(*a)
    )
    decoded(compiled, "dllm-lowconf", prompts()[:1], block=1)
    assert filled[:NEW] == list(range(5, 5 + NEW))


@pytest.mark.parametrize("name", FILLS)
def test_what_stays_stays_and_each_call_fills(model, name, monkeypatch):
    """No slot is filled twice, every call fills one or more, and all are filled at the end."""
    _, compiled = model(True)
    filled, own = [], Canvas.commit

    def commit(self, i, guess, places):
        slots = guess.slots[places]
        assert self.open[i, slots].all() and slots.size, (
            "a slot that was filled is filled again, or none is"
        )
        filled.extend(slots.tolist())
        own(self, i, guess, places)

    monkeypatch.setattr(Canvas, "commit", commit)
    with with_loop(compiled, name, block=BLOCK) as made:
        made.generate(prompts()[0], max_new_tokens=NEW, eos=[])
    assert sorted(filled) == list(range(5, 5 + NEW))


def test_factor_takes_more_as_it_grows():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sure = rng.random(9) ** 0.1
        guess = guess_of(sure)
        taken = [
            set(DllmThreshold(factor=f).stays(guess, None).tolist()) for f in (0.2, 0.5, 1.0, 2.0)
        ]
        assert all(a <= b for a, b in zip(taken, taken[1:], strict=False)) and len(taken[0]) >= 1
        for f, some in zip((0.2, 0.5, 1.0, 2.0), taken, strict=True):
            assert len(some) == 1 or all(sure[i] > 1 - f / (len(some) + 1) for i in some)
        over = [
            set(DllmThreshold(threshold=t).stays(guess, None).tolist()) for t in (0.99, 0.9, 0.5)
        ]
        assert all(a <= b for a, b in zip(over, over[1:], strict=False))


# Exactness of freedave, and that a wrong rule is seen


@dataclasses.dataclass(frozen=True)
class Trusting(Freedave):
    """Takes every draft."""

    def _standing(self, draft, order, found):
        return max(1, len(found))


@pytest.mark.few(2)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
def test_freedave_gives_the_tokens_of_static_decoding(model, shift, cache):
    _, compiled = model(shift)
    fewer = wrong = 0
    for seed in range(3):
        (prompt,) = prompts(seed, (7,))
        want, most = driven(DllmLowconf(block=BLOCK, cache=cache), compiled, prompt)
        got, calls = driven(Freedave(block=BLOCK, cache=cache), compiled, prompt)
        assert got == want and calls <= most
        fewer += most - calls
        wrong += driven(Trusting(block=BLOCK, cache=cache), compiled, prompt)[0] != want
    assert fewer > 0 and wrong > 0


def test_freedave_with_a_repetition_penalty_is_static_too(model):
    _, compiled = model(True)
    sampler = Standard(repetition_penalty=1.7)
    for seed in range(2):
        (prompt,) = prompts(seed, (7,))
        want, _ = driven(DllmLowconf(block=BLOCK), compiled, prompt, sampler)
        assert driven(Freedave(block=BLOCK), compiled, prompt, sampler)[0] == want


def test_freedave_refuses_to_sample(model):
    with with_loop(model(False)[1], "freedave") as made:
        with pytest.raises(
            accel.InputError, match="give temperature 0, or build with loop = dllm-lowconf"
        ):
            made.generate([1, 2, 3], temperature=0.7)
        assert len(made.generate([1, 2, 3], max_new_tokens=4, eos=[]).tokens[0]) == 4


def test_sampling_draws_from_the_samplers_law(model):
    """One slot, one call: its token has the model's own distribution at that temperature."""
    module, compiled = model(False)
    prompt = prompts()[0]
    scores = module(torch.tensor([[*prompt, MASK]]))[0, -1].detach()
    scores[MASK] = -torch.inf
    law = (scores / 1.5).softmax(-1).numpy()
    with with_loop(compiled, "dllm-threshold") as made:
        found = np.bincount(
            [
                made.generate(prompt, 1, temperature=1.5, seed=s, eos=[]).tokens[0][0]
                for s in range(200)
            ],
            minlength=VOCABULARY,
        )
        again = made.generate(prompt, 9, temperature=1.5, seed=3, eos=[]).tokens
        assert again == made.generate(prompt, 9, temperature=1.5, seed=3, eos=[]).tokens
    likely = law > 0.02
    off = (found[likely] - 200 * law[likely]) / np.sqrt(200 * law[likely] * (1 - law[likely]))
    assert np.abs(off).max() < 4 and found[MASK] == 0
