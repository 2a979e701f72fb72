"""BASS: one draft length for a batch, by the row that took most; rows get what each gets alone."""

import math

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.length.bass import Bass
from accel.runtime.loop.speculative import Speculative
from accel.runtime.speculation.round_cost import unmeasured_cost

from ...batch_case import batch, law, tables, to_the_next_row, watched
from ...draft_case import plain
from ...prefill_case import built
from ...runtime.test_rounds import context, scheduled

HOW = {"drafter": PromptLookup(), "rule": "spec-chain", "length": Bass()}


def published(rounds, first=7, grow=2, part=10, most=32):
    """The paper's heuristic: the length of each round, of what rows accepted [b] in the rounds before."""
    length, short, found = first, 0, [first]
    for accepted in rounds:
        if max(accepted) >= length:
            length, short = min(length + grow, most), 0
        else:
            length = max(1, length - math.ceil(length / part) - short, *accepted)
            short = 1
        found.append(length)
    return found


def test_the_length_follows_the_published_steps():
    rng, seen = np.random.default_rng(0), set()
    for chance in (0.3, 0.8, 0.97):
        paces, rounds, lengths = Bass().open([], unmeasured_cost), [], []
        for _ in range(60):
            limits = paces.limits([0, 2, 3])
            assert len({*limits.values()}) == 1, "rows share one length"
            lengths.append(limits[0])
            rounds.append([min(limits[0], int(rng.geometric(1 - chance)) - 1) for _ in range(3)])
            for row, accepted in zip((0, 2, 3), rounds[-1], strict=True):
                paces.observe(row, limits[row], accepted)
        assert lengths == published(rounds)[:-1]
        seen |= {*lengths}
    assert {1, 7, 32} <= seen


def test_a_round_without_drafts_changes_nothing_and_short_drafts_count_as_they_are():
    paces = Bass().open([], unmeasured_cost)
    assert [paces.limits([0])[0] for _ in range(3)] == [7, 7, 7]
    paces.observe(0, 3, 3)  # there were no more
    assert paces.limits([0])[0] == 9
    paces.observe(0, 3, 3)
    paces.observe(1, 9, 2)
    assert paces.limits([0])[0] == 8


def test_the_recipe_and_what_it_refuses():
    plan = assemble(Recipe.load("bass"))
    uses = {a: t["use"] for a, t in plan.recipe.tables.items()}
    assert uses["draft"] == "model" and uses["length"] == "bass" and uses["batch"] == "flat"
    for wrong, said in (({"part": 0}, "part is 0"), ({"tokens": 40}, "more than most = 32")):
        with pytest.raises(RecipeError, match=said):
            Bass(**wrong)


def test_rows_get_what_they_get_alone(monkeypatch):
    model = built("llama", tables=tables("flat"))
    law(model, monkeypatch, **HOW)
    with pytest.raises(AssertionError):
        law(model, monkeypatch, to_the_next_row, **HOW)


@pytest.mark.long
def test_rows_come_and_go_in_flat_calls(monkeypatch):
    """As in an engine: what a call has is of the rows that are there."""
    model, told = (
        built("llama", tables=tables("flat")),
        context(PromptLookup(), "chain", None, Bass()),
    )
    want = [plain(model.session(), [row])[0] for row in batch(range(5))]
    calls = watched(monkeypatch, on=True)
    assert scheduled(model, Speculative(), told, batch(range(5))) == want
    assert len({len(given["slots"]) for given in calls}) > 1, "nothing joins"
    watched(monkeypatch, True, to_the_next_row)
    assert scheduled(model, Speculative(), told, batch(range(5))) != want
