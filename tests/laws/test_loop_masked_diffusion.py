"""What loops that fill masks hold to: the published decoding that each one's test file writes down, whatever is cached,
and the same alone and in a batch.
"""

import dataclasses

import numpy as np
import pytest
import torch

import accel
from accel.compiler.capabilities import conflicts
from accel.ir.axis import Axis
from accel.ir.invariants import Invariant
from accel.runtime.canvas import Base, Sheet
from accel.runtime.loop._canvas import Canvas

from ..diffusion_case import (
    BLOCK,
    MASK,
    NEW,
    VOCABULARY,
    Fed,
    Filler,
    canvases,
    decoded,
    driven,
    eager,
    every,
    official,
    own,
    prompts,
    surest,
    with_loop,
)

AXIS, METHODS = Axis("loop", "accel.runtime.loop"), Axis("canvas", "accel.runtime.canvas")
FILLS = [name for name in AXIS.names() if "canvas" in AXIS.method(name).asks]
CASES = [(name, case) for name in FILLS for case in own(name).CASES]
CANVASES = {f"{name} {fed.options}": (name, fed) for name, fed in canvases()}
WHOLE = "whole", Fed({}, every)
FITS = [
    (use, case, name)
    for use, case in CASES
    for name, (canvas, _) in CANVASES.items()
    if not conflicts({"loop": AXIS.build(use), "canvas": METHODS.build(canvas)})
]


def law_published(shift, canvas, use, case, stays=None, given=None, new=NEW, feeds=None):
    """Tokens and calls of a loop are those of the rules; `stays`, `feeds`: of others than the cases'."""
    module, compiled = eager(shift)
    given = prompts() if given is None else given
    name, fed = canvas
    rules = stays or case.stays, feeds or fed.rule, case.early, case.slides
    options = {"block": BLOCK, **case.options}
    wanted = [
        official(module, prompt, new, options["block"], *rules, slots=fed.slots) for prompt in given
    ]
    table = {"use": name, **fed.options}
    tokens, calls, together = decoded(compiled, use, given, new, table, **options)
    assert tokens == [t for t, _ in wanted] == together
    for got, (_, most) in zip(calls, wanted, strict=True):
        assert got <= most if case.fewer else got == most


@pytest.mark.few(6)
@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
@pytest.mark.parametrize("use, case, canvas", FITS, ids=str)
def test_tokens_are_those_of_the_published_loop(shift, use, case, canvas):
    """Rows of three lengths."""
    law_published(shift, CANVASES[canvas], use, case, given=prompts(0, (5, 11, 2)))


@pytest.mark.parametrize("use", FILLS)
def test_another_rule_is_seen(use):
    """The control: the least sure mask of each call, in the place of what one of a method's cases fills."""
    with pytest.raises(AssertionError):
        for case in own(use).CASES:
            law_published(True, WHOLE, use, case, stays=least_sure)


def least_sure(seen):
    return [int(np.where(seen.free, seen.sure, np.inf).argmin())]


def test_a_method_without_a_published_form_fails():
    with pytest.raises(pytest.fail.Exception, match="test_no_such_loop lacks CASES"):
        own("no-such-loop")


def test_canvases_differ_where_they_may():
    """Or the comparison above would not see one taken for another."""
    module = Filler(False).eval()
    given = prompts(0, (5, 11, 7, 9))
    found = {
        str([official(module, p, NEW, BLOCK, surest(1), fed.rule, slots=fed.slots) for p in given])
        for _, fed in CANVASES.values()
    }
    assert len(found) == len(CANVASES)


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


# What a call computes


def law_fed_by_block(method):
    """What is filled in a block changes nothing of which slots its calls compute, or the method says that it does; one
    whose layers choose goes by what is filled.
    """
    rng, other = np.random.default_rng(4), 0
    for step in (0, 1, 2, 3, 5):
        masks = np.arange(24) >= 8
        told = []
        for _ in range(6):
            now, age = masks.copy(), np.full(24, step)
            now[8:16] = rng.random(8) < 0.5
            now[15] = True
            age[8:16] = rng.integers(0, step + 1, 8)
            told.append(method.feeds(Sheet(step, 8, 16, now, np.where(now, 0, age), 1)))
        other += any((one != told[0]).any() for one in told)
    by_layer = (
        method.part(Sheet(1, 8, 16, np.arange(24) >= 8, np.zeros(24, int), 1, 8, 1)) is not None
    )
    assert (Invariant.FED_BY_BLOCK in method.breaks) == (other > 0 or by_layer)


@pytest.mark.parametrize("name", CANVASES)
def test_which_slots_are_computed_goes_by_the_block_or_says_that_it_does_not(name):
    use, fed = CANVASES[name]
    law_fed_by_block(METHODS.build(use, **fed.options))


@dataclasses.dataclass(frozen=True)
class Hidden(Base):
    """Computes what a call filled, and says nothing of it; of no mask where `mask` is False."""

    mask: bool = True

    def feeds(self, sheet):
        if not sheet.step:
            return sheet.every
        found = sheet.asked(sheet.open) & self.mask
        return found | (~sheet.open & (sheet.age == 0))


def test_a_method_that_hides_it_is_seen():
    with pytest.raises(AssertionError):
        law_fed_by_block(Hidden())


def test_a_method_that_computes_no_mask_is_named():
    loop = AXIS.build("dllm-lowconf", block=BLOCK)
    with pytest.raises(accel.AccelError, match="computes no mask of the block that row 0 is at"):
        driven(loop, eager(False)[1], prompts()[0], canvas=Hidden(mask=False))


def test_what_freedave_is_refused_with_gives_other_tokens():
    """freedave, were it not refused: other tokens than one per call has with the same cache."""
    (_, compiled), canvas = eager(True), METHODS.build("dkv-cache", refresh=100)
    loops = [AXIS.build(use, block=16) for use in ("dllm-lowconf", "freedave")]
    found = {
        str([driven(loop, compiled, p, canvas=canvas)[0] for p in prompts(2, (5, 7, 9, 11))])
        for loop in loops
    }
    assert len(found) == 2


# Bad input


@pytest.mark.parametrize("name", FILLS)
def test_answers_below_a_block_and_prompts_with_the_mask(name):
    """The masks of a prompt are never filled."""
    case = own(name).CASES[0]
    given = prompts()
    given[0][2] = given[1][-1] = MASK
    law_published(True, WHOLE, name, case, given=given, new=3)


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
    for option, value in [*wrong, ("block", 0), ("block", 2.5)]:
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
