"""EMS-SD: rows that draft different numbers of tokens share calls without padding; each gets what it gets alone."""

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import InputError
from accel.ir.recipe import Recipe
from accel.runtime.draft.prompt_lookup import PromptLookup

from .batch_case import law, tables, to_the_next_row, watched
from .prefill_case import built

HOW = {"drafter": PromptLookup(), "rule": "sample-match"}


@pytest.fixture(scope="module")
def model():
    return built("llama", tables=tables("flat"))


def test_the_recipe_is_prompt_lookup_over_flat_calls():
    plan = assemble(Recipe.load("ems-sd"))
    assert {a: t["use"] for a, t in plan.recipe.tables.items()} == {
        "batch": "flat",
        "draft": "prompt-lookup",
        "length": "fixed",
        "loop": "speculative",
        "verify": "sample-match",
    }
    assert plan.grade == "lossless"


def test_rows_get_what_they_get_alone(model, monkeypatch):
    rows = law(model, monkeypatch, **HOW)
    assert len({row.drafting["accepted"] for row in rows}) > 2, "rows take the same number"


def test_an_owner_that_is_off_by_one_is_caught(model, monkeypatch):
    with pytest.raises(AssertionError):
        law(model, monkeypatch, to_the_next_row, **HOW)


def test_tokens_beyond_the_context_are_refused_and_nothing_is_lost(model, monkeypatch):
    """A draft that a row has no room for, beside rows that have; the session then goes on as before."""
    seen = watched(monkeypatch, True)
    with model.session(3) as session:
        full = session.max_context
        ids = np.random.default_rng(1).integers(3, 50, (3, full))
        session.run(ids, [full - 3, 5, 9])
        before = {n: a.copy() for n, a in session._core.backend.buffers().items()}
        calls = len(seen)
        with pytest.raises(InputError, match="context"):
            session.run(ids[:, :4], [4, 0, 1])
        assert len(seen) == calls and session.lengths.tolist() == [full - 3, 5, 9]
        for name, array in session._core.backend.buffers().items():
            np.testing.assert_array_equal(array, before[name])
        logits = session.run(ids[:, :3], [3, 0, 1])
        assert len(seen) == calls + 1 and np.isfinite(logits).all()
