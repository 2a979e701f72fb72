"""What loops that fill masks hold to: the published decoding that each one's test file writes down, whatever is cached,
and the same alone and in a batch.
"""

import dataclasses

import numpy as np
import pytest
import torch

import accel
from accel.ir.axis import Axis
from accel.runtime.loop._canvas import Canvas

from ..diffusion_case import (
    BLOCK,
    CACHES,
    MASK,
    NEW,
    VOCABULARY,
    Filler,
    decoded,
    eager,
    official,
    own,
    prompts,
    surest,
    with_loop,
)

AXIS = Axis("loop", "accel.runtime.loop")
FILLS = [name for name in AXIS.names() if AXIS.method(name).masked_diffusion]
CASES = [(name, case) for name in FILLS for case in own(name).CASES]


def law_published(shift, cache, use, case, stays=None, given=None, new=NEW):
    """Tokens and calls of a loop are those of the rule; `stays`: of another one than the case's."""
    module, compiled = eager(shift)
    given = prompts() if given is None else given
    rules = stays or case.stays, cache, case.early
    options = {"block": BLOCK, "cache": cache, **case.options}
    wanted = [official(module, prompt, new, options["block"], *rules) for prompt in given]
    tokens, calls, together = decoded(compiled, use, given, new, **options)
    assert tokens == [t for t, _ in wanted] == together
    for got, (_, most) in zip(calls, wanted, strict=True):
        assert got <= most if case.fewer else got == most


@pytest.mark.few(6)
@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("use, case", CASES, ids=str)
def test_tokens_are_those_of_the_published_loop(shift, cache, use, case):
    law_published(shift, cache, use, case)


@pytest.mark.parametrize("use", FILLS)
def test_another_rule_is_seen(use):
    """The control: the least sure mask of each call, in the place of what one of a method's cases fills."""
    with pytest.raises(AssertionError):
        for case in own(use).CASES:
            law_published(True, "none", use, case, stays=least_sure)


def least_sure(seen):
    return [int(np.where(seen.free, seen.sure, np.inf).argmin())]


def test_a_method_without_a_published_form_fails():
    with pytest.raises(pytest.fail.Exception, match="test_no_such_loop lacks CASES"):
        own("no-such-loop")


def test_caches_differ_where_they_may():
    """Or the comparison above would not see one taken for another."""
    module = Filler(False).eval()
    found = {
        str(official(module, p, NEW, BLOCK, surest(1), cache))
        for cache in CACHES
        for p in prompts()[:1]
    }
    assert len(found) == 3


@pytest.mark.parametrize("name", FILLS)
def test_what_stays_stays_and_each_call_fills(name, monkeypatch):
    """No slot is filled twice, every call fills one or more, and all are filled at the end."""
    _, compiled = eager(True)
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


# Bad input


@pytest.mark.parametrize("name", FILLS)
def test_answers_below_a_block_and_prompts_with_the_mask(name):
    """The masks of a prompt are never filled."""
    case = own(name).CASES[0]
    given = prompts()
    given[0][2] = given[1][-1] = MASK
    law_published(True, "none", name, case, given=given, new=3)


@pytest.mark.parametrize("name", FILLS)
def test_a_row_ends_at_eos_within_a_block(name):
    _, compiled = eager(False)
    with with_loop(compiled, name, block=BLOCK) as made:
        (whole,) = made.generate(prompts()[0], max_new_tokens=NEW, eos=[]).tokens
        stop = whole[BLOCK + 2]
        cut = made.generate(prompts()[0], max_new_tokens=NEW, eos=[stop])
        assert cut.tokens == [whole[: whole.index(stop) + 1]] and cut.stats["finish"] == ["eos"]
        assert made.generate(prompts()[0], max_new_tokens=NEW, eos=[]).tokens == [whole]


@pytest.mark.parametrize("name", FILLS)
def test_options_that_are_no_numbers_are_refused(name):
    options = [f for f in dataclasses.fields(AXIS.method(name)) if f.init]
    wrong = [(f.name, value) for f in options if isinstance(f.default, float) for value in NONE]
    for option, value in [*wrong, ("block", 0), ("block", 2.5), ("cache", "some")]:
        with pytest.raises(accel.RecipeError, match=option):
            AXIS.build(name, **{option: value})


NONE = (float("nan"), float("inf"), "0.9", None)


# Sampling


def test_sampling_draws_from_the_samplers_law():
    """One slot, one call: its token has the model's own distribution at that temperature."""
    module, compiled = eager(False)
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
