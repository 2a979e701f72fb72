"""Rules of verification: what each is for, what it reads, and what it refuses."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import AccelError, InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.sample import Distribution
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import Siblings, Tree
from accel.runtime.verify import Chance, Target, Verdict
from accel.runtime.verify._residual import ratio

from .verify_case import (
    AXIS,
    CHAINS,
    DRAFTS,
    Stuck,
    World,
    distance,
    gap,
    generated,
    outcomes,
    sampled,
    takes,
)

NAMES = AXIS.names()
JUDGES = [n for n in NAMES if AXIS.method(n).verifies]
DRAWN = ("specinfer-tree", "spectr-kseq")  # which take siblings that were drawn independently
EXACT = [n for n in NAMES if AXIS.method(n).grade != "approximate"]


def judged(rule, world, parents):
    """The law of (path, next token) of one round."""

    def program(chance):
        tree, logits = world.tree(parents, world.drafted(parents, (), chance), ())
        verdict = rule(Target(tree, logits, np.zeros(0, np.int64), world.sampler), chance)
        return tuple(tree.tokens[list(verdict.path)].tolist()), verdict.token

    return outcomes(program)


def accepted(rule, world, parents):
    """Tokens accepted in a round, on average."""
    return sum(len(path) * weight for (path, _), weight in judged(rule, world, parents).items())


class Fixed(World):
    """The same p and q after every prefix."""

    def __init__(self, p, q, draft="other", again=False):
        super().__init__(sampled(), draft, size=len(p), replacement=again)
        with np.errstate(divide="ignore"):
            self.p, self.fixed = np.log(np.array(p, np.float32)), np.array(q, np.float64)

    def _logits(self, seen):
        return self.p

    def _q(self, seen):
        return self.fixed


REJECTION = ("block-verify", "rrs-wor", "spec-chain")


@pytest.mark.parametrize("name", REJECTION)
def test_a_perfect_draft_stands_and_an_impossible_one_falls(name):
    rule = AXIS.build(name)
    for sampler in (sampled(), sampled(top_p=0.7), Standard()):
        assert accepted(rule, World(sampler, "same"), (-1, 0, 1)) == pytest.approx(3, abs=1e-12)
        assert accepted(rule, World(sampler, "disjoint"), (-1, 0, 1)) == 0


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(8))
def test_a_block_stands_no_less_than_its_tokens(seed):
    block, chain = AXIS.build("block-verify"), AXIS.build("spec-chain")
    for draft, parents in itertools.product(("other", "holes", "chosen"), CHAINS):
        world = World(sampled(temperature=0.7), draft, seed)
        assert accepted(block, world, parents) >= accepted(chain, world, parents) - 1e-12


def test_the_block_of_the_paper():
    world = Fixed([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    assert accepted(AXIS.build("block-verify"), world, (-1, 0)) == pytest.approx(11 / 9, abs=1e-6)
    assert accepted(AXIS.build("spec-chain"), world, (-1, 0)) == pytest.approx(10 / 9, abs=1e-6)


def test_rules_agree_on_one_token():
    for draft in DRAFTS:
        laws = [judged(AXIS.build(n), World(sampled(), draft), (-1,)) for n in REJECTION]
        assert max(distance(laws[0], law) for law in laws) < 1e-12


def test_trees_of_one_child_are_chains():
    for draft in DRAFTS:
        world = World(sampled(), draft)
        chain, tree = (judged(AXIS.build(n), world, (-1, 0)) for n in ("spec-chain", "rrs-wor"))
        assert distance(chain, tree) < 1e-12


def test_all_tokens_as_siblings_leave_nothing_to_reject():
    for draft in ("same", "other", "sure", "chosen"):
        assert accepted(
            AXIS.build("rrs-wor"), World(sampled(), draft), (-1, -1, -1)
        ) == pytest.approx(1)


def test_chosen_siblings_stand_as_often_as_the_target_says_them():
    world = World(sampled(), "chosen")
    best = np.argsort(-world.q(()))[:2]
    want = world.law(()).dense(3)[best].sum()
    for name in ("rrs-wor", "sample-match"):
        assert accepted(AXIS.build(name), world, (-1, -1)) == pytest.approx(want, abs=1e-12)


def test_typical_acceptance():
    """Stands above min(epsilon, delta exp(-entropy)); the longest path, then the likelier one."""
    p = np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    entropy = -(p * np.log(p)).sum()

    def path(tokens, parents, **options):
        tree = Tree(np.array(tokens), np.array(parents))
        logits = np.tile(np.log(p), (len(tokens) + 1, 1))
        target = Target(tree, logits, np.zeros(0, np.int64), sampled())
        return AXIS.build("medusa-typical", **options)(
            target, Chance(np.random.default_rng(0))
        ).path

    assert path([2, 3], [-1, 0]) == (0,)
    assert path([3, 0], [-1, 0]) == ()
    assert path([1, 0, 2], [-1, -1, 0]) == (0, 2), "longer before likelier"
    assert path([1, 0], [-1, -1]) == (1,)
    border = float(0.15 / np.exp(-entropy))
    assert path([2], [-1], epsilon=1.0, delta=border * 0.99) == (0,)
    assert path([2], [-1], epsilon=1.0, delta=border * 1.01) == ()
    chain = ([0, 1, 2, 3], [-1, 0, 1, 2])
    lengths = [len(path(*chain, epsilon=e, delta=9.0)) for e in (0.0, 0.1, 0.2, 0.4, 1.0)]
    assert lengths == [4, 3, 2, 1, 0]
    for value in (-0.1, math.nan, math.inf):
        with pytest.raises(RecipeError, match="medusa-typical: delta is .*; give at least 0"):
            AXIS.build("medusa-typical", delta=value)


# What is read, and what is refused


class Counting(Standard):
    """A sampler that knows how often it was asked."""

    asked = 0

    def distribution(self, logits, seen):
        type(self).asked += 1
        return super().distribution(logits, seen)


@pytest.mark.parametrize("name", JUDGES)
def test_greedy_reads_the_rows_that_it_reaches_and_nothing_else(name):
    """No q, and no random number."""
    logits = np.full((6, 4), np.nan, np.float32)
    logits[0], logits[1] = [0, 9, 0, 0], [0, 0, 9, 0]
    tree = Tree.chain([1, 3, 0, 0, 0], np.full((5, 4), np.nan))
    Counting.asked = 0
    verdict = AXIS.build(name)(
        Target(tree, logits, np.zeros(1, np.int64), Counting()), Chance(None)
    )
    assert (verdict, Counting.asked) == (Verdict((0,), 2), 2)


@pytest.mark.parametrize("name", JUDGES)
def test_a_rule_that_samples_reads_no_row_behind_a_token_that_cannot_stand(name):
    logits = np.full((4, 3), np.nan, np.float32)
    logits[0], logits[1] = [0, 0, 0], [-np.inf, 0, 0]
    tree = Tree.chain([1, 0, 1], np.full((3, 3), 1 / 3))
    Counting.asked = 0
    target = Target(tree, logits, np.zeros(0, np.int64), Counting(1.0))
    verdict = AXIS.build(name)(target, Chance(Stuck(0.5)))
    assert (verdict.path, Counting.asked) == ((0,), 2)


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("sampler", [Standard(), sampled(), sampled(top_k=2)], ids=str)
def test_logits_that_are_no_numbers(name, sampler):
    for row in (0, 1):
        logits = np.array([[9, 0], [9, 0], [9, 0]], np.float32)
        logits[row, 1] = np.nan
        target = Target(Tree.chain([0, 0]), logits, np.zeros(0, np.int64), sampler)
        with pytest.raises(AccelError, match="not numbers"):
            list(target.taken(AXIS.build(name)(target, Chance(Stuck(0.0)))))


class Fails(Standard):
    """Lets nothing follow a 0."""

    def distribution(self, logits, seen):
        if seen.size and seen[-1] == 0:
            raise InputError("nothing")
        return super().distribution(logits, seen)


@pytest.mark.few(6)
@pytest.mark.parametrize("draft", ["other", "holes", "chosen"])
@pytest.mark.parametrize("parents", [(-1, 0), (-1, -1, 0, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", EXACT)
def test_an_error_comes_as_often_as_without_a_draft(name, parents, draft):
    """Behind a node it is an outcome like a token: -1 here, which only itself follows."""
    rule, world = AXIS.build(name), World(sampled(), draft, seed=3, replacement=name in DRAWN)
    if not takes(rule, parents, draft, world.replacement):
        parents = CHAINS[2]
        world = World(sampled(), draft, seed=3)

    def plainly(seen, chance):
        return (-1,) if seen and seen[-1] < 1 else (chance.draw(world.law(seen)),)

    def drafting(seen, chance):
        if seen and seen[-1] < 1:
            return (-1,)
        tree, logits = world.tree(parents, world.drafted(parents, seen, chance), seen)
        target = Target(tree, logits, np.array(seen, np.int64), Fails(1.0))
        new = []
        try:
            new += (token for token, _ in target.taken(rule(target, chance)))
        except InputError:
            new.append(-1)
        return tuple(new)

    assert distance(generated(drafting, 3), generated(plainly, 3)) < 1e-6


@pytest.mark.parametrize("name", [n for n in NAMES if not AXIS.method(n).branches])
def test_a_tree_is_refused_by_who_takes_chains(name):
    tree = Tree(np.array([0, 1, 2]), np.array([-1, 0, 0]))
    target = Target(tree, np.zeros((4, 3), np.float32), np.zeros(0, np.int64), Standard())
    near = AXIS.method(name).instead
    with pytest.raises(
        InputError, match=f"verify.{name} takes chains, but node 2 .* use verify = {near}"
    ):
        AXIS.build(name)(target, Chance(np.random.default_rng(0)))
    assert AXIS.build(near)(target, Chance(np.random.default_rng(0))) == Verdict((0,), 0)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_rule_declares(name):
    rule = AXIS.method(name)
    assert rule.grade in ("lossless", "distribution-exact", "approximate")
    whole = rule.branches and rule.siblings == frozenset(Siblings)
    near = rule if whole else AXIS.method(rule.instead)
    assert near.branches and near.siblings == frozenset(Siblings)
    assert rule.siblings >= {Siblings.INDEPENDENT, Siblings.CHOSEN}, (
        "the assembler asks for no more"
    )


def test_a_tree_that_does_not_fit_the_logits():
    tree = Tree.chain([1, 5], np.full((2, 6), 1 / 6))
    for logits, message in (
        (np.zeros((2, 6)), r"logits \[2, 6\] for a tree of 2 tokens; .* \[3, vocabulary\]"),
        (np.zeros((3, 5)), r"token 5 at place 1 is not in the vocabulary \(0..4\)"),
        (np.zeros(6), "logits"),
    ):
        with pytest.raises(InputError, match=message):
            Target(tree, logits.astype(np.float32), np.zeros(0, np.int64), Standard())
    wide = Tree.chain([1], np.full((1, 6), 1 / 6))
    with pytest.raises(InputError, match="q has 6 columns and the target 5 tokens"):
        Target(wide, np.zeros((2, 5), np.float32), np.zeros(0, np.int64), Standard())


@pytest.mark.parametrize("name", EXACT)
def test_a_drafter_may_know_fewer_tokens(name):
    """q of two columns; the target says a third."""

    class Narrow(World):
        def tree(self, parents, tokens, seen):
            tree, logits = super().tree(parents, tokens, seen)
            return dataclasses.replace(tree, q=tree.q[:, :2]), logits

        def _q(self, seen):
            return np.array([0.7, 0.3, 0])

    assert gap(AXIS.build(name), Narrow(sampled()), (-1, 0)) < 1e-12


def test_a_q_that_says_no_such_token_lets_it_fall():
    p, q = (Distribution(np.arange(2), np.array(w)) for w in ([0.5, 0.5], [0.0, 1.0]))
    assert ratio(p, q, 0) == 0


def test_a_recipe_without_a_drafter_is_refused():
    recipe = Recipe("mine", "", tables={"verify": {"use": "rrs-wor"}})
    with pytest.raises(
        RecipeError,
        match="'mine': verify sets which drafted tokens are accepted, but the recipe has no .draft.",
    ):
        assemble(recipe)


def test_choices_are_those_of_each_row():
    """Of all rows at once, where they are those that `distribution` gives; elsewhere of none."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        logits = rng.integers(-2, 3, (5, 7)).astype(np.float32)  # with equals
        each = [
            int(Standard().distribution(row, np.zeros(0, np.int64)).tokens[0]) for row in logits
        ]
        assert Standard().choices(logits).tolist() == each
    assert Standard(temperature=0.5).choices(logits) is None
    assert Standard(repetition_penalty=1.1).choices(logits) is None
    logits[2, 3] = np.nan
    assert Standard().choices(logits) is None, "a row that nobody reads may hold anything"

    class Least(Standard):
        def distribution(self, logits, seen):
            return super().distribution(-logits, seen)

    assert Least().choices(logits) is None
