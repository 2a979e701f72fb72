"""eqspec: rows of a batch that take different numbers of drafted tokens each get what they get alone; a session's rows
have lengths of their own, so none is realigned.
"""

import numpy as np
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.ir.recipe import Recipe
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session

from .draft_case import plain, rows_of, speculated
from .prefill_case import built, module

ROWS = 8


def texts():
    """Eight prompts of different lengths; every second one repeats itself."""
    rng, found = np.random.default_rng(4), []
    for size in range(9, 9 + ROWS):
        found.append(
            np.tile(rng.integers(3, 50, 5), 4)[:size] if size % 2 else rng.integers(3, 50, size)
        )
    return found


@pytest.fixture(scope="module", params=["float32", "batch-invariant"])
def model(request):
    """Its sessions are those of plain decoding: what drafts is the loop."""
    if request.param == "float32":
        yield built("llama")
        return
    with accel.optimize(
        module("llama"), "batch-invariant", max_context=64, max_batch=ROWS
    ) as exact:
        yield exact


def drafted(model, sampler, prompts):
    """Each row's tokens, and how many of them were drafted."""
    rows = ending(prompts, sampler)
    with session_of(model, len(prompts)) as session:
        list(speculated(session, rows, PromptLookup(), "sample-match"))
        assert session.lengths.tolist() == [row.seen.size - 1 for row in rows], "of ended rows too"
    return [row.tokens for row in rows], [row.drafting["accepted"] for row in rows]


def ending(prompts, sampler):
    """Rows that end at different times, by their prompts."""
    return [rows_of([p], sampler, limit=12 + len(p) % 5 * 3)[0] for p in prompts]


def session_of(model, batch):
    """A session of any number of rows."""
    session = model.session()
    session.select([0] * batch)
    return session


def law(model):
    """A batch gives what each row gets alone, drafted or not, greedy and sampled."""
    numbers = set()
    for sampler in (Standard(), Standard(temperature=0.7)):
        together, stood = drafted(model, sampler, texts())
        assert together == plain(session_of(model, ROWS), ending(texts(), sampler))
        assert drafted(model, sampler, texts()[::-1])[0] == together[::-1]
        for prompt, got in list(zip(texts(), together, strict=True))[::3]:
            assert drafted(model, sampler, [prompt])[0] == [got]
            assert plain(model.session(), ending([prompt], sampler)) == [got]
        numbers |= set(stood)
    assert len(numbers) > 2, "rows take the same number of tokens: nothing is tested"


@pytest.mark.long
def test_a_row_of_a_batch_gets_what_it_gets_alone(model):
    law(model)


def test_rows_that_are_kept_in_step_are_caught(model, monkeypatch):
    """Every row goes back as far as the one that took least, as where a batch has one length."""
    rewind = Session.rewind

    def together(self, length):
        back = self.lengths - np.broadcast_to(length, self.lengths.shape)
        rewind(self, np.maximum(self.lengths - back.max(), 0))

    monkeypatch.setattr(Session, "rewind", together)
    with pytest.raises(AssertionError):
        law(model)


def test_the_recipe_is_exact_in_any_batch():
    """It samples as plain decoding does, over logits that have the same bits in any call."""
    plan = assemble(Recipe.load("eqspec"))
    assert plan.grade == "lossless" and not plan.methods["verify"].reads_q
    assert (
        Recipe.load("eqspec").tables["numerics"]
        == Recipe.load("batch-invariant").tables["numerics"]
    )
