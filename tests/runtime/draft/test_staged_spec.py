"""Staged drafts: the tokens of the draft model alone, bit for bit, in fewer of its calls."""

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.draft import staged_spec
from accel.runtime.draft.model import Model
from accel.runtime.draft.staged_spec import StagedSpec
from accel.runtime.tree.chain import Chain
from accel.runtime.verify import Chance
from accel.runtime.verify.spec_chain import SpecChain

from ...open_case import Opened, Tables
from ...verify_case import World, sampled


class Counted(Opened):
    """It counts what the draft model ran."""

    calls = ran = 0

    def session(self, batch=1):
        of = self

        class Counting(Tables):
            def run(self, tokens, *given, **options):
                of.calls, of.ran = of.calls + 1, of.ran + tokens.shape[1]
                return super().run(tokens, *given, **options)

        return Counting(self.logits, self.logits, self.world.size)


class Periodic(World):
    """What comes repeats itself mostly."""

    def _table(self, seed, seen):
        rng = np.random.default_rng([self.seed, seed, len(seen), *seen[-1:]])
        bias = 4.0 * (np.arange(self.size) == len(seen) % self.size)
        return (rng.standard_normal(self.size) + bias).astype(np.float32)


def generations(method, sampler, count=12):
    """The tokens of generations with the same random numbers, and the draft model's calls and tokens."""
    world = Periodic(sampler, "other", size=4)
    opened = Counted(method, Chain(), SpecChain(), world, limit=6)
    found = [opened.tokens(Chance(np.random.default_rng(seed)), 20)[0] for seed in range(count)]
    return found, opened.calls, opened.ran


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_tokens_are_those_of_the_draft_model_alone_in_fewer_calls(temperature):
    sampler = sampled(temperature=temperature)
    want, calls, ran = generations(Model(), sampler)
    got, fewer, more = generations(StagedSpec(), sampler)
    assert got == want, (
        "the same random numbers: every token is drawn, none is taken from a look-up"
    )
    assert fewer < 0.8 * calls and more > ran
    same, as_many, as_wide = generations(StagedSpec(ahead=0), sampler)
    assert same == want and (as_many, as_wide) == (calls, ran), "nothing looked up: `model`"


def test_what_was_looked_up_may_not_count_without_a_draw(monkeypatch):
    """A control: a look-up that is taken for a match wherever it stands changes the tokens."""

    class Always(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    further = staged_spec._Staged.further

    def takes(self, tokens):
        for known in self._known.values():
            known[:] = [(Always(token), line) for token, line in known]
        return further(self, tokens)

    want, *_ = generations(Model(), sampled())
    monkeypatch.setattr(staged_spec._Staged, "further", takes)
    got, *_ = generations(StagedSpec(), sampled())
    assert got != want


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"draft": {"ngram": 0}}, "staged-spec: ngram is 0; give 1 to 64"),
        ({"draft": {"ahead": -1}}, "staged-spec: ahead is -1; give 0 to 64"),
        (
            {"draft": {}, "tree": {"use": "static"}},
            "draft = staged-spec cannot be combined with tree",
        ),
    ],
)
def test_what_does_not_fit(tables, words):
    tables = {**tables, "draft": {"use": "staged-spec", **tables["draft"]}}
    with pytest.raises(RecipeError, match=words):
        assemble(Recipe("mine", tables=tables))
