"""Jacobi decoding over the toy: the same tokens as without, what becomes of its guesses, blocks, ends, the guard."""

import numpy as np
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.costs import Costs
from accel.runtime.loop import jacobi
from accel.runtime.loop.jacobi import Jacobi
from accel.runtime.sample.standard import Standard

from ...draft_case import plain, rows_of
from ...prefill_case import module

PROMPTS = [[5, 17, 200, 3, 88], [9], list(range(40, 61))]
WARM = Standard(temperature=0.3, top_k=4)


def run(toy, rows, block=6, costs=None):
    with toy.session(batch=len(rows)) as session:
        list(Jacobi(block).tokens(session, rows, DecodeContext(costs=costs)))
        assert session.lengths.tolist() == [row.seen.size - 1 for row in rows]
        return [row.tokens for row in rows], session.stats["calls"]


@pytest.mark.parametrize("sampler", [Standard(), WARM])
def test_tokens_are_those_of_plain_decoding(toy, sampler):
    want, stood = plain(toy.session(batch=3), rows_of(PROMPTS, sampler, limit=30)), 0
    for block in (1, 2, 6, 40):
        rows = rows_of(PROMPTS, sampler, limit=30)
        got, calls = run(toy, rows, block)
        assert got == want and calls <= 30
        assert block > 1 or calls == 30, "a block of one is plain decoding"
        stood += sum(row.drafting["accepted"] for row in rows)
    assert stood, "no guess ever stood"
    assert [run(toy, rows_of([p], sampler, limit=30))[0][0] for p in PROMPTS] == want


def blocks(toy, sampler=WARM, block=6):
    """Of one row, the calls of each block: (the tokens before it, its guesses)."""
    found = []

    class Spied(jacobi._Block):
        def draft(self, seen, limit):
            new = self._guesses is None
            tree = super().draft(seen, limit)
            found.extend([[]] * new)
            found[-1] = [*found[-1], (seen.copy(), tree.tokens.copy())]
            return tree

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jacobi, "_Block", Spied)
        run(toy, rows_of(PROMPTS[2:], sampler, limit=40), block)
    return found


def law_of_blocks(toy, block=6):
    """The guesses of a call are what the model says of those of the call before, without any cache, from the first one
    that was not accepted on; a block has one guess fewer for each token that came, and takes no more calls than tokens.
    """
    changed = 0
    for calls in blocks(toy, block=block):
        assert len(calls) <= block
        for (seen, guesses), (later, after) in zip(calls, calls[1:], strict=False):
            new = later.size - seen.size
            said = toy.oracle(np.concatenate([seen, guesses]))[seen.size - 1 : -1].argmax(1)
            assert after.tolist() == said[new:].tolist() and 1 <= new
            changed += after.size > 0
    assert changed, "nothing was compared"


def test_guesses_are_what_the_model_says_of_those_before(toy):
    law_of_blocks(toy)


@pytest.mark.parametrize("broken", ["kept", "late"])
def test_guesses_that_are_not_replaced_or_misplaced_are_caught(toy, monkeypatch, broken):
    def observe(self, tree, verdict, logits):
        stood = len(verdict.path)
        self._at += stood + 1
        if self._guesses is None or stood == self._guesses.size:
            self._guesses = None
        elif broken == "kept":
            self._guesses = self._guesses[stood + 1 :]
        else:
            self._guesses = logits[stood : len(logits) - 2].argmax(1)

    monkeypatch.setattr(jacobi._Block, "observe", observe)
    with pytest.raises(AssertionError):
        law_of_blocks(toy)


@pytest.mark.parametrize("ends", [{"limit": 1}, {"limit": 2}, {"max_context": 24}, {"eos": 4}])
def test_rows_end_where_they_would(toy, ends):
    if "eos" in ends:
        ends = {"eos": [plain(toy.session(batch=3), rows_of(PROMPTS))[0][ends["eos"]]]}
    want, got = rows_of(PROMPTS, **ends), rows_of(PROMPTS, **ends)
    plain(toy.session(batch=3), want)
    run(toy, got)
    assert [(r.tokens, r.finish) for r in got] == [(r.tokens, r.finish) for r in want]


def test_where_calls_cost_too_much_it_rests(toy):
    """And begins a new block afterwards."""
    steep = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    dear = Costs(steep, tuple(float(n) for n in steep))
    rows = rows_of(PROMPTS[:1], limit=90)
    got, calls = run(toy, rows, costs=dear)
    assert got == plain(toy.session(), rows_of(PROMPTS[:1], limit=90))
    assert rows[0].drafting["fallback"] > 40 and rows[0].drafting["rounds"]


@pytest.mark.long
def test_batch_invariant_tokens_are_those_without():
    models = [
        accel.optimize(module("llama"), recipe, max_context=64, max_batch=3)
        for recipe in (["jacobi", "batch-invariant"], "batch-invariant")
    ]
    with models[0] as guessing, models[1] as without:
        texts = [[5, 17, 20, 3, 5, 17, 20, 3], [9], list(range(3, 20))]
        for options in ({}, {"temperature": 0.8, "seed": 2}):
            want, got = (m.generate(texts, 20, eos=[], **options) for m in (without, guessing))
            assert got.tokens == want.tokens
            assert want.stats["speculation"] is None and got.stats["costs"]


def test_what_it_cannot_do_without_is_said():
    assert assemble(Recipe.load("jacobi")).grade == "lossless"
    with pytest.raises(RecipeError, match="loop.jacobi: block is 0; give 1 to 256"):
        Jacobi(0)
    with pytest.raises(RecipeError, match="loop = jacobi cannot be combined with.*h2o|h2o.*jacobi"):
        assemble(Recipe(tables={"kv.score": {"use": "h2o"}, "loop": {"use": "jacobi"}}))
