"""Staged drafts: the chains and trees of the draft model alone, bit for bit, in fewer of its calls."""

import dataclasses

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.draft import staged_spec
from accel.runtime.draft.model import Model
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.draft.staged_spec import StagedSpec
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.dyspec import Dyspec
from accel.runtime.tree.specinfer_tree import SpecinferTree
from accel.runtime.tree.static import Static
from accel.runtime.verify import Chance
from accel.runtime.verify.rrs_wor import RrsWor
from accel.runtime.verify.spec_chain import SpecChain
from accel.runtime.verify.specinfer_tree import SpecinferTree as SpecinferRule

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

            def guess(self, tokens, *given):
                of.calls, of.ran = of.calls + 1, of.ran + tokens.shape[1]
                return super().guess(tokens, *given)

        return Counting(self.logits, self.logits, self.world.size, batch)


class Periodic(World):
    """What comes repeats itself mostly."""

    def _table(self, seed, seen):
        rng = np.random.default_rng([self.seed, seed, len(seen), *seen[-1:]])
        bias = 4.0 * (np.arange(self.size) == len(seen) % self.size)
        return (rng.standard_normal(self.size) + bias).astype(np.float32)


def generations(method, sampler, count=12, shape=None, rule=None, batch=1):
    """The tokens of generations with the same random numbers, and the draft model's calls and tokens."""
    world = Periodic(sampler, "other", size=4)
    shape, rule = shape or Chain(), rule or SpecChain()
    opened = Counted(method, shape, rule, world, limit=6, batch=batch)
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


TREES = {
    "narrow": (Static(widths=[1, 1, 2, 1]), RrsWor()),
    "wide": (Static(widths=[2, 1, 1]), RrsWor()),
    "dynamic": (Dyspec(threshold=0.1), RrsWor()),
    "independent": (SpecinferTree(widths=[1, 2, 1, 1]), SpecinferRule()),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("batch", [1, 2])
def test_trees_are_those_of_the_draft_model_alone_in_fewer_calls(name, batch):
    shape, rule = TREES[name]
    sampler = sampled(temperature=0.5)
    more = {"shape": shape, "rule": rule, "count": 4, "batch": batch}
    want, calls, ran = generations(Model(), sampler, **more)
    got, fewer, _ = generations(StagedSpec(), sampler, **more)
    assert got == want and fewer < calls
    assert generations(StagedSpec(ahead=0), sampler, **more) == (want, calls, ran)


def opened(**more):
    """Trees with a level that was looked up."""
    world = World(sampled(), "other", size=2)
    return Opened(StagedSpec(ngram=1), Static(widths=[1, 1, 2]), RrsWor(), world, limit=4, **more)


def test_tokens_of_staged_trees_are_the_targets_own(monkeypatch):
    """And a control: where a look-up stands in a draft in place of what was drawn, they are not."""
    assert opened().gap(length=4) < 1e-12
    draft = staged_spec._StagedTrees.draft

    def takes(self, limits, more):
        trees = dict(draft(self, limits, more))
        for i, tree in trees.items():
            found = PromptLookup(1).draft(self.rows[i].seen, 1).tokens
            if found.size and len(tree):
                tokens = np.concatenate([found, tree.tokens[1:]])
                trees[i] = dataclasses.replace(tree, tokens=tokens)
        return trees

    monkeypatch.setattr(staged_spec._StagedTrees, "draft", takes)
    assert opened().gap(length=4) > 1e-3


def test_a_node_that_takes_what_was_said_of_another_is_caught(monkeypatch):
    """A control: logits of a look-up are taken for those of whatever was drawn at its place."""
    paths = staged_spec._StagedLevels._paths
    taken = set()

    def others(self, i, level):
        found = []
        for path in paths(self, i, level):
            alike = [known for known in self._known[i] if len(known) == len(path)]
            taken.update(one for one in alike[:1] if one != path)
            found += alike[:1] or [path]
        return found

    sampler = sampled()
    more = {"shape": Static(widths=[1, 1, 2, 1]), "rule": RrsWor()}
    want, *_ = generations(Model(), sampler, **more)
    monkeypatch.setattr(staged_spec._StagedLevels, "_paths", others)
    got, *_ = generations(StagedSpec(), sampler, **more)
    assert taken and got != want


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"draft": {"ngram": 0}}, "staged-spec: ngram is 0; give 1 to 64"),
        ({"draft": {"ahead": -1}}, "staged-spec: ahead is -1; give 0 to 64"),
        (
            {"draft": {}, "tree": {"use": "static"}, "verify": {"use": "spec-chain"}},
            "verify = spec-chain cannot be combined with tree = static",
        ),
    ],
)
def test_what_does_not_fit(tables, words):
    tables = {**tables, "draft": {"use": "staged-spec", **tables["draft"]}}
    with pytest.raises(RecipeError, match=words):
        assemble(Recipe("mine", tables=tables))
