"""Laws of verification: what comes out of drafted rounds is what the target gives alone, proved by walking every way
that drafting and judging can fall.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ir.errors import InputError
from accel.runtime.sample import Distribution
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import ROOT, Tree, without
from accel.runtime.verify import Chance, Verdict
from accel.runtime.verify._residual import excess, ratio, residual

from ..verify_case import (
    AXIS,
    CHAINS,
    DRAFTS,
    WAYS,
    Stuck,
    Walk,
    World,
    alone,
    gap,
    meant,
    sampled,
    takes,
)

NAMES = AXIS.names()
EXACT = [n for n in NAMES if AXIS.method(n).grade != "approximate"]
TREES = ((-1, -1), (-1, -1, -1), (-1, 0, -1), (-1, -1, 0, 0, 1))
SAMPLERS = {
    "greedy": Standard(),
    "plain": sampled(),
    "cold": sampled(temperature=0.5),
    "top_k": sampled(top_k=2),
    "top_p": sampled(top_p=0.7),
    "penalty": sampled(repetition_penalty=1.7),
    "counts": sampled(presence_penalty=1.1, frequency_penalty=0.6),
}
many = settings(max_examples=250, deadline=None, derandomize=True)


def law_exact(rule, parents, worlds):
    """The first three tokens have the target's joint law, to rounding."""
    for world in worlds:
        found = gap(rule, world, parents)
        assert found < 1e-12, (world.sampler, world.draft, world.replacement)


def worlds(rule, parents):
    """Samplers, and what siblings the rule takes: all pairs of small trees, each of both once of larger ones."""
    ways = [way for way in WAYS if takes(rule, parents, *way)]
    pairs = list(itertools.product(SAMPLERS.values(), ways))
    if len(parents) > 2:
        turns = range(max(len(SAMPLERS), len(ways)))
        pairs = [(pairs[t % len(SAMPLERS) * len(ways)][0], ways[t % len(ways)]) for t in turns]
    if len(parents) > 4:
        pairs = pairs[1:4:2] + [(SAMPLERS["plain"], ways[-1])]
    return [World(sampler, draft, replacement=again) for sampler, (draft, again) in pairs]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name, parents",
    [(n, p) for n in EXACT for p in CHAINS + TREES if p in CHAINS or AXIS.method(n).branches],
    ids=str,
)
def test_tokens_are_the_target_s_own(name, parents):
    rule = AXIS.build(name)
    law_exact(rule, parents, worlds(rule, parents))


REACH = [(sampled(), "other"), (sampled(top_k=2), "other"), (sampled(temperature=0.5), "holes")]


def law_of_each(rule, name):
    """What every rule is held to by default: a chain of two, and a small tree where it takes one."""
    forms = [(-1, 0), *([(-1, -1, 0)] if AXIS.method(name).branches else [])]
    for parents, (sampler, draft), seed in itertools.product(forms, REACH, range(3)):
        if takes(AXIS.method(name), parents, draft):
            assert gap(rule, World(sampler, draft, seed), parents, 2) < 1e-12


@pytest.mark.parametrize("name", EXACT)
def test_each_rule_gives_the_target_s_tokens(name):
    law_of_each(AXIS.build(name), name)


def test_each_rule_s_law_catches_a_broken_block():
    for name in ("a block cut at its first failure", "accepts always", "nothing subtracted"):
        with pytest.raises(AssertionError):
            law_of_each(WRONG[name], "block-verify")


def test_the_law_walks_each_kind_of_siblings():
    for name in (n for n in EXACT if AXIS.method(n).branches):
        rule = AXIS.build(name)
        kinds = {meant(w.draft, w.replacement) for w in worlds(rule, (-1, -1, -1))}
        assert kinds == rule.siblings, name


@st.composite
def forms(draw):
    """The size of a vocabulary, and parents that have at most so many children each."""
    size, parents = draw(st.integers(1, 4)), []
    for node in range(draw(st.integers(0, 3))):
        parents.append(draw(st.integers(ROOT, node - 1)))
    full = any(parents.count(p) > size for p in parents)
    return size, tuple(range(-1, len(parents) - 1)) if full else tuple(parents)


@many
@given(
    name=st.sampled_from(EXACT),
    form=forms(),
    seed=st.integers(0, 1000),
    way=st.sampled_from([way for way in WAYS if way[0] != "disjoint"]),
    sampler=st.builds(
        Standard,
        temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
        top_k=st.sampled_from([None, 1, 2, 3]),
        top_p=st.sampled_from([None, 0.5, 0.9]),
        min_p=st.sampled_from([None, 0.2]),
        repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
        presence_penalty=st.sampled_from([0.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, -0.8]),
    ),
)
def test_any_form_any_law(name, form, seed, way, sampler):
    (size, parents), (draft, again) = form, way
    if size == 1 and draft == "holes":
        draft = "other"  # one token cannot be left out
    world = World(sampler, draft, seed, size, again)
    if takes(AXIS.method(name), parents, draft, again):
        assert gap(AXIS.build(name), world, parents, 2) < 1e-12


@pytest.mark.parametrize("name", [n for n in NAMES if AXIS.method(n).branches])
def test_siblings_that_a_rule_does_not_take_are_refused(name):
    rule = AXIS.build(name)
    for draft, again in WAYS:
        if not takes(rule, (-1, -1), draft, again):
            with pytest.raises(
                InputError, match=f"verify.{name} takes siblings that are .* but node 1"
            ):
                World(sampled(), draft, replacement=again).round(rule, (-1, -1), (), Walk([]))


def test_a_rule_that_says_approximate_is():
    """And exact where the target is greedy, as every rule that does not say that it is tolerant there, too."""
    for name in set(NAMES) - set(EXACT):
        rule = AXIS.build(name)
        assert gap(rule, World(sampled()), (-1, 0)) > 1e-3
        parents = (-1, -1, 0) if rule.branches else (-1, 0)
        found = max(gap(rule, World(Standard(), draft), parents) for draft in DRAFTS)
        assert (found > 0.1) if rule.tolerant else (found < 1e-12)


# What the law catches: rejection with one thing wrong


def rejection(
    order=lambda children: children,
    accept=lambda chance, probability: chance.accept(probability),
    after=lambda owed, law: residual(owed, excess(owed, law)),
    last=lambda target, node, owed: owed,
    law=lambda tree, child: tree.law(child),
):
    """`descend` anew, so that a part can be replaced."""

    def rule(target, chance):
        tree, node, path = target.tree, ROOT, []
        while True:
            owed = target.law(node)
            for child in order(tree.children(node)):
                given_, token = law(tree, child), int(tree.tokens[child])
                if accept(chance, ratio(owed, given_, token)):
                    break
                owed = after(owed, given_)
            else:
                return Verdict(tuple(path), chance.draw(last(target, node, owed)))
            node = child
            path.append(node)

    return rule


class Raw(Distribution):
    """Weights that are taken for probabilities."""

    total = 1.0


def no_division(owed, law):
    over = excess(owed, law)
    return Raw(owed.tokens, over) if over.any() else owed


def as_if_replaced(tree, child):
    return Distribution(np.arange(tree.q.shape[1]), tree.q[child])


def as_if_apart(tree, child):
    before = [s for s in tree.children(int(tree.parents[child])) if s < child]
    return without(Tree.law(tree, child), tree.tokens[before])


def of_parent(target, node, owed):
    """The bonus of a leaf, out of the row before it."""
    leaf = node != ROOT and not target.tree.children(node)
    return target.law(int(target.tree.parents[node])) if leaf else owed


def uncut(target, chance):
    """Block verification that stops at the first length that does not stand."""
    kept, length = 1.0, 0
    for node, token in enumerate(target.tree.tokens.tolist()):
        kept = min(1.0, kept * ratio(target.law(node - 1), target.tree.law(node), token))
        if not chance.accept(kept):
            break
        length = node + 1
    law = target.law(length - 1)
    if length < len(target.tree):
        law = residual(law, excess(law, target.tree.law(length)))
    return Verdict(tuple(range(length)), chance.draw(law))


def likeliest_alone(target, chance):
    """The sibling that the target finds likeliest, by one test, whatever the others are."""
    tree, node, path = target.tree, ROOT, []
    while tree.children(node):
        law = target.law(node)
        best = max(tree.children(node), key=lambda child: law.of(int(tree.tokens[child])))
        if not chance.accept(ratio(law, tree.law(best), int(tree.tokens[best]))):
            return Verdict(tuple(path), chance.draw(residual(law, excess(law, tree.law(best)))))
        node = best
        path.append(node)
    return Verdict(tuple(path), chance.draw(target.law(node)))


WRONG = {
    "the likeliest sibling alone": likeliest_alone,
    "accepts always": rejection(accept=lambda chance, probability: True),
    "nothing subtracted": rejection(after=lambda owed, law: owed),
    "not renormalised": rejection(
        after=no_division, last=lambda target, node, owed: Distribution(owed.tokens, owed.weights)
    ),
    "another order": rejection(order=lambda children: list(reversed(children))),
    "without replacement taken for with": rejection(law=as_if_replaced),
    "independent taken for without replacement": rejection(law=as_if_apart),
    "the bonus of another row": rejection(last=of_parent),
    "a block cut at its first failure": uncut,
}


@pytest.mark.parametrize("name", WRONG)
def test_the_law_catches(name):
    forms = [(-1, 0)] if name.startswith("a block") else [(-1, -1, 0), (-1, -1, -1)]
    again = name.startswith("independent")
    law_exact(rejection(), forms[0], [World(*pair, replacement=again) for pair in REACH])
    reach = [World(*pair, seed, replacement=again) for seed in range(4) for pair in REACH]
    assert any(gap(WRONG[name], world, f, 2) > 0.01 for world in reach for f in forms)


class Lying(World):
    """A world whose drafter records another law than it drew from."""

    def tree(self, parents, tokens, seen):
        tree, logits = super().tree(parents, tokens, seen)
        return self.recorded(tree), logits

    def recorded(self, tree):
        raise NotImplementedError


class Warmer(Lying):
    def recorded(self, tree):
        q = tree.q**0.5
        return dataclasses.replace(tree, q=q / q.sum(1, keepdims=True))


class Argmax(Lying):
    """A chosen token, recorded as drawn."""

    def recorded(self, tree):
        even = np.full((len(tree), self.size), 1 / self.size)
        return dataclasses.replace(tree, q=even, rows=None)


class Forgetful(Tree):
    """Siblings drawn with replacement, of which the law says without."""

    law = as_if_apart


class Replaced(Lying):
    def recorded(self, tree):
        return Forgetful(tree.tokens, tree.parents, tree.q, replacement=True)


@pytest.mark.parametrize("kind", [Warmer, Argmax, Replaced])
def test_the_law_catches_a_drafter_that_says_another_q(kind):
    draft = "chosen" if kind is Argmax else "other"
    world = kind(sampled(), draft, 1, replacement=kind is Replaced)
    assert gap(AXIS.build("rrs-wor"), world, (-1, -1), 2) > 0.01
    assert gap(AXIS.build("sample-match"), world, (-1, -1), 2) < 1e-12, "reads no q"


# With real random numbers


def decoded(step, rng, length, prompt=(2, 0)):
    seen = prompt
    while len(seen) < length + len(prompt):
        seen = (*seen, *step(seen, rng))
    return seen[len(prompt) : len(prompt) + length]


def law_same_numbers(rule, sampler, seed):
    """The tokens of plain sampling with the same generator, whatever is drafted."""
    world = World(sampler, size=4)
    want = decoded(
        lambda seen, rng: (sampler(world.logits(seen), np.array(seen), rng),),
        np.random.default_rng(seed),
        40,
    )
    for draft, parents in (
        ("other", (-1, 0, 1)),
        ("chosen", (-1, -1, 0, 0, 1)),
        ("sure", (-1, -1)),
    ):
        world, luck = World(sampler, draft, size=4), Chance(np.random.default_rng(seed + 100))
        tokens = {}

        def drafted(parents, seen, chance, world=world, luck=luck, tokens=tokens):
            return tokens.setdefault(seen, World.drafted(world, parents, seen, luck))

        world.drafted = drafted  # by random numbers of its own
        got = decoded(
            lambda seen, rng, w=world, p=parents: w.round(rule, p, seen, Chance(rng)),
            np.random.default_rng(seed),
            40,
        )
        assert got == want


@pytest.mark.parametrize("name", [n for n in NAMES if AXIS.method(n).grade == "lossless"])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_lossless_rules_give_the_tokens_of_the_same_numbers(name, sampler):
    for seed in range(3):
        law_same_numbers(AXIS.build(name), sampler, seed)


def test_the_law_of_numbers_catches():
    law_same_numbers(AXIS.build("rrs-wor"), Standard(), 0)
    with pytest.raises(AssertionError):
        law_same_numbers(AXIS.build("rrs-wor"), sampled(), 0)


def surprise(rule, world, parents, rounds=4000):
    """Chi-squared of the first two tokens against the target's law, 9 cells at most."""
    want, rng = alone(world, 2), np.random.default_rng(7)
    found = dict.fromkeys(want, 0)
    for _ in range(rounds):
        chance = Chance(rng)
        found[
            decoded(lambda seen, _, c=chance: world.round(rule, parents, seen, c), rng, 2, ())
        ] += 1
    return sum((found[k] - rounds * w) ** 2 / (rounds * w) for k, w in want.items())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", EXACT)
def test_frequencies(name):
    rule = AXIS.build(name)
    parents = (-1, -1, 0) if rule.branches else (-1, 0)
    world = World(sampled(), replacement=not takes(rule, parents, "other"))
    assert surprise(rule, world, parents) < 30, "8 on average, by 4"


def test_frequencies_catch():
    assert surprise(WRONG["nothing subtracted"], World(sampled()), (-1, -1, -1)) > 60


def law_possible(name, number):
    """No token has a probability of 0, by a random number that always comes."""
    for draft, seed in itertools.product(("holes", "disjoint", "sure", "chosen"), range(5)):
        world = World(sampled(top_p=0.8), draft, seed)
        seen = ()
        for _ in range(4):
            chance = Chance(Stuck(number))
            for token in world.round(AXIS.build(name), (-1, 0), seen, chance):
                assert world.law(seen).of(token) > 0
                seen = (*seen, token)


@pytest.mark.parametrize("name", [n for n in NAMES if AXIS.method(n).verifies])
@pytest.mark.parametrize("number", [0.0, math.nextafter(1, 0)])
def test_what_has_no_probability_never_comes(name, number):
    """Not by the ends of the random numbers' range either."""
    law_possible(name, number)


@pytest.mark.parametrize("name", [n for n in NAMES if not AXIS.method(n).verifies])
def test_what_verifies_nothing_takes_all(name):
    """And so also what the target would never say."""
    with pytest.raises(AssertionError):
        law_possible(name, math.nextafter(1, 0))
    world, seen = World(sampled(), "disjoint", 0), ()
    for chance in (Chance(Stuck(0.0)), Chance(np.random.default_rng(0))):
        assert len(world.round(AXIS.build(name), (-1, 0), seen, chance)) == 3
