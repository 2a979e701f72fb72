"""Stacks: the best member's draft is taken, on each kind of text, or all as one tree; and what is no member."""

from types import SimpleNamespace

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.invariants import Invariant
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.costs import Costs
from accel.runtime.draft import stack as module
from accel.runtime.draft.stack import Stack, merged
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.odds import Odds
from accel.runtime.speculation.texts import TextStore
from accel.runtime.tree import Tree
from accel.runtime.tree.static import Static
from accel.runtime.verify import Verdict
from accel.runtime.verify.rrs_wor import RrsWor

from ...draft_case import Says, rows_of
from ...store_case import decode, plain

COSTS = Costs((1, 32), (1.0, 2.0))
FACTS = SimpleNamespace(max_context=64, vocab_size=60)


def speed(method, kind, limit=300):
    """Tokens for the cost of the calls, of one request of a kind of text."""
    prompt = [1, 2, 3]
    rest, likely = kind(limit)
    row, spent = rows_of([prompt], limit=limit)[0], 0.0
    context = DecodeContext({"tree": Static(), "verify": RrsWor()}, COSTS)
    session = SimpleNamespace(vocab_size=60, batch=1)
    drafters = method.open(session, [row], context)
    while not row.finish:
        tree = drafters.draft({0: min(16, row.left)}, lambda *_: True)[0]
        spent += COSTS.ratio(1 + len(tree))
        node, path = -1, []
        done = len(row.tokens)
        while found := [
            c for c in tree.children(node) if [tree.tokens[c]] == rest[done : done + 1]
        ]:
            node, done = found[0], done + 1
            path.append(node)
        logits = np.zeros((len(tree) + 1, 60), np.float32)
        for line, token in zip(logits, [int(row.seen[-1]), *tree.tokens.tolist()], strict=True):
            line[likely(token)] = 9
        token = rest[done] if done < limit else 0
        drafters.observe(0, tree, Verdict(tuple(path), token), logits)
        for taken in (*tree.tokens[path].tolist(), token):
            if not row.finish:
                row.accept(taken, None)
    drafters.close()
    return limit / spent


def copied(limit):
    """A text that repeats itself, of a model that is never sure."""
    return np.tile(np.random.default_rng(0).permutation(50), 6)[:limit].tolist(), lambda token: []


def known(limit):
    """Each token has two successors, which the model knows, in an order that does not come again."""
    rng, text = np.random.default_rng(1), [3]
    while len(text) < limit:
        text.append(int(rng.choice([(text[-1] * 7 + more) % 53 for more in (1, 8)])))
    return text, lambda token: [(token * 7 + more) % 53 for more in (1, 8)]


def random(limit):
    return np.random.default_rng(2).integers(0, 60, limit).tolist(), lambda token: []


KINDS = (copied, known, random)


def law(stack):
    """On each kind of text it is as quick as its best member, but for 5 %; members differ."""
    best = []
    for kind in KINDS:
        alone = [speed(one, kind) for one in stack.built]
        assert speed(stack, kind) >= 0.95 * max(alone), kind.__name__
        best.append(int(np.argmax(alone)))
    assert len(set(best)) > 1, "one member is the best on all: nothing is tested"


def test_it_is_as_quick_as_its_best_member_on_each_kind():
    law(Stack())


def test_taking_the_first_or_the_longest_is_caught(monkeypatch):
    """Whatever was drafted is worth the same, or what it is long."""
    for value in (lambda *_: (2.0, 9), lambda self, odds, draft: (1.0 + len(draft.tree), 99)):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(module._Stacked, "_value", value)
            law(Stack(["prompt-lookup", "token-recycling"]))


def test_a_size_goes_by_all_drafts_at_first():
    whole = Odds(0.95)
    few = Odds(0.95, whole)
    whole.observe([(4, 3)] * 20)
    assert few.expected(6) == whole.expected(6)
    few.observe([(4, 0)] * 20)
    assert few.expected(6)[1] < 1.3 < 1.8 < whole.expected(6)[1]
    assert few.chances(6)[1:] == whole.chances(6)[1:], "places that it never tested"


def test_a_union_holds_what_all_draft():
    first, second = Tree.chain([1, 2, 3]), Tree(np.array([1, 4, 2, 5]), np.array([-1, -1, 0, 2]))
    for limit in range(1, 9):
        tree = merged([first, second], limit)
        paths = {tuple(tree.tokens[list(tree.path(n))]) for n in range(len(tree))}
        want = [(1,), (1, 2), (1, 2, 3), (4,), (1, 2, 5)][:limit]
        assert paths == set(want)


@pytest.mark.parametrize("union", [False, True])
@pytest.mark.parametrize("verify", ["sample-match", "rrs-wor"])
def test_tokens_are_those_of_plain_decoding(union, verify):
    """Also beside a member that would draw its tokens; greedy by each rule, seeded by one that draws as plain does."""
    stack = Stack(["token-recycling", {"use": "suffix-tree", "shared": True}, "sam"], union)
    for sampler in (Standard(), Standard(temperature=0.8)):
        if verify == "rrs-wor" and not sampler.greedy:
            continue
        store, prompts, drafted = stack.store(FACTS, None), [[1, 2, 3], [9, 8, 7]], []
        for _ in range(2):

            def watch(tree, drafted=drafted):
                assert tree.q is None
                drafted.append(len(tree))

            got = decode(stack, prompts, sampler, store=store, verify=verify, watch=watch)
            assert got[0] == plain(prompts, sampler)
        assert sum(drafted) and store[1].tokens.size


def test_members_have_their_stores():
    members = ["prompt-lookup", {"use": "sam", "shared": True}]
    assert Stack().store(FACTS, None) is None
    none, store = Stack(members).store(FACTS, None)
    assert none is None and isinstance(store, TextStore)


def test_members_are_closed_where_one_cannot_open():
    closed = []

    class Opens(Says):
        def open(self, session, rows, context):
            return SimpleNamespace(close=lambda: closed.append(True))

    class Fails(Says):
        def open(self, session, rows, context):
            raise ValueError

    stack = Stack()
    object.__setattr__(stack, "built", (Opens(None), Fails(None)))
    with pytest.raises(ValueError):
        stack.open(None, rows_of([[1]]), DecodeContext())
    assert closed == [True]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (["sufix-tree", "sam"], "did you mean 'suffix-tree'"),
        (["sam", "stack"], "a stack is no member of a stack"),
        (["sam", {"use": "stack", "members": ["sam", "iad"]}], "a stack is no member of a stack"),
        (["sam", {"use": "iad", "ngrams": 2}], "did you mean 'ngram'"),
        (["sam"], "not two or more; give names"),
        ("sam", "not two or more; give names"),
        (["sam", 3], "member 3 names no drafter"),
        (["sam", {"ngram": 3}], "names no drafter"),
        (["sam", "model"], "model runs a model for each draft"),
        (["sam", "layerskip"], "layerskip runs a model for each draft"),
    ],
)
def test_what_is_no_member(members, words):
    with pytest.raises(RecipeError, match=f"draft.stack: .*{words}"):
        assemble(Recipe(tables={"draft": {"use": "stack", "members": members}}))


def test_what_it_goes_with():
    """Its members say what it relies on, and what it breaks."""
    plan = assemble(Recipe(tables={"draft": {"use": "stack"}}))
    assert plan.recipe.tables["tree"]["use"] == "static"
    chains = Stack(["sam", "prompt-lookup"])
    assert not chains.asks and not chains.breaks and not chains.provides
    assert Invariant.CHAINS in Stack(["sam", "iad"], union=True).breaks
    with pytest.raises(RecipeError, match="tree = dyspec cannot be combined with draft = stack"):
        assemble(Recipe(tables={"draft": {"use": "stack"}, "tree": {"use": "dyspec"}}))
