"""What drafters hold to: of single rows, a chain of ids, no longer than was asked for, and nothing that rows share; of
all rows, that tokens are the target's own, proved by walking every way that whole generations can fall.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from accel.ir.axis import Axis
from accel.ir.invariants import Invariant
from accel.runtime.draft import Base
from accel.runtime.draft.model import Model
from accel.runtime.tree import Tree

from ..draft_case import Says
from ..grow_case import AXIS as SHAPES
from ..open_case import Opened, Tables
from ..verify_case import AXIS as RULES
from ..verify_case import World, sampled

AXIS = Axis("draft", "accel.runtime.draft")
VOCABULARY = 6
BY_ROW = [name for name in AXIS.names() if AXIS.method(name).begin is not Base.begin]


def drafts(drafter, seen, size, step=3):
    """What a row's drafter proposes while its tokens after a prompt of `size` come."""
    return [drafter.draft(seen[:end], 1 + end % 4) for end in range(size + 1, len(seen), step)]


def law(method):
    """Of two rows that take turns, each gets what it gets alone; no draft is too long or of other ids."""
    rng, proposed = np.random.default_rng(1), 0
    for size in (1, 2, 9, 30):
        rows = [rng.integers(0, VOCABULARY, 60), rng.permutation(60) % VOCABULARY]
        alone = [drafts(method.begin(seen[:size]), seen, size) for seen in rows]
        begun = [method.begin(seen[:size]) for seen in rows]
        for turn, end in enumerate(range(size + 1, 60, 3)):
            for i, seen in enumerate(rows):
                before, limit = seen[:end].copy(), 1 + end % 4
                tree = begun[i].draft(seen[:end], limit)
                assert np.array_equal(seen[:end], before), "it changed what it saw"
                assert len(tree) <= limit
                assert tree.branch is None or Invariant.CHAINS in method.breaks
                assert not len(tree) or tree.tokens.max() < VOCABULARY
                assert tree.tokens.tolist() == alone[i][turn].tokens.tolist(), (
                    "rows share something"
                )
                proposed += len(tree)
    assert proposed, "it never drafts"


@pytest.mark.parametrize("name", BY_ROW)
def test_every_drafter(name):
    law(AXIS.build(name))


def remembers():
    last = []

    def says(seen, limit):
        last.append(seen[-1])
        return Tree.chain(last[-2:-1])

    return says


BROKEN = {
    "too long": lambda seen, limit: Tree.chain(seen[-limit - 1 :]),
    "other ids": lambda seen, limit: Tree.chain([VOCABULARY]),
    "shared": remembers(),
    "silent": lambda seen, limit: Tree.chain([]),
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_broken_one_is_caught(says):
    with pytest.raises(AssertionError):
        law(Says(BROKEN[says]))


# Drafters of all rows


def shapes(method):
    """Those that it works with; of a drafter with a form of its own, any one."""
    all_ = [SHAPES.build(name) for name in SHAPES.names()]
    fit = [s for s in all_ if not s.breaks & method.relies and s.relies <= method.provides]
    return fit if "tree" in method.asks else fit[:1]


def law_open(method):
    """Tokens are the target's own by a rule that reads q and by one that does not, of those that take its trees."""
    drafted = 0
    for shape in shapes(method):
        rules = [RULES.build(name) for name in RULES.names()]
        breaks = shape.breaks | method.breaks
        fit = [r for r in rules if r.grade != "approximate" and not r.relies & breaks]
        for rule in {r.reads_q: r for r in fit}.values():
            opened = Opened(method, shape, rule, World(sampled(), "other", size=2))
            assert opened.gap() < 1e-12, (shape, rule)
            drafted += opened.drafted
    assert drafted, "it never drafts"


def law_follows(method):
    """A drafter that reads what the target reads is right, also after a draft of which a part did not count."""
    chain, rule = SHAPES.build("chain"), RULES.build("spec-chain")
    same, misled = (
        Opened(method, chain, rule, World(sampled(), "same", size=2), misled=misled)
        for misled in (False, True)
    )
    assert same.falls() < 1e-6 and misled.falls() < 1e-6


# what a head reads no table says (`test_eagle3.py`, `test_mtp.py`)
@pytest.mark.parametrize("name", [n for n in AXIS.names() if not AXIS.method(n).head])
def test_every_drafter_of_all_rows(name):
    law_open(AXIS.build(name))


def runs_a_model(name):
    method = AXIS.build(name)
    runs = bool(method.needs) or method.draft_folder() is not None
    # who fills masks does not see what it drafts; for heads see above
    return runs and not method.fills and not method.head


ONE_BY_ONE = {"s3d": {"masks": 0}}  # a mask does not see what it drafts


@pytest.mark.parametrize("name", filter(runs_a_model, AXIS.names()))
def test_every_drafter_follows(name):
    law_follows(AXIS.build(name, **ONE_BY_ONE.get(name, {})))


@dataclass(frozen=True)
class Changed(Model):
    """A draft model whose trees are changed before they are judged, or whose session is."""

    change: str = ""

    def open(self, session, rows, context):
        if self.change == "stale":
            context.model.draft_model.session = (
                lambda batch=1, of=context.model.draft_model.session: Stale(of(batch))
            )
        drafters = super().open(session, rows, context)
        drafts = drafters.draft

        def change(tree):
            return getattr(self, self.change)(tree) if tree.q is not None else tree

        def changed(limits, more):
            return {i: change(tree) for i, tree in drafts(limits, more).items()}

        if self.change in ("warmer", "unsure"):
            drafters.draft = changed
        return drafters

    def warmer(self, tree):
        q = tree.q**0.5
        return dataclasses.replace(tree, q=q / q.sum(1, keepdims=True))

    def unsure(self, tree):
        """Leave the last token out where it is unlikely, after it was drawn."""
        if tree.law(len(tree) - 1).of(int(tree.tokens[-1])) > 0.5:
            return tree
        return Tree(tree.tokens[:-1], tree.parents[:-1], tree.q[:-1], np.arange(len(tree) - 1))


class Stale(Tables):
    """It answers by tokens that are long gone."""

    def __init__(self, of):
        super().__init__(of.says, of.less, of.vocab_size)
        self.log = []

    def run(self, tokens, *args, **options):
        self.log += tokens[0].tolist()
        said = self.says
        self.says = lambda held: said(tuple(self.log))
        try:
            return super().run(tokens, *args, **options)
        finally:
            self.says = said


def test_the_laws_of_all_rows_catch():
    law_open(Changed())
    for change in ("warmer", "unsure"):
        with pytest.raises(AssertionError):
            law_open(Changed(change=change))
    with pytest.raises(AssertionError):
        law_follows(Changed(change="stale"))


def test_a_cache_that_is_taken_over_wrongly_is_caught(monkeypatch):
    """Of a drafter that begins with the target's keys and values: those of other tokens."""
    take = Tables.take

    def others(self, other, lengths):
        taken = take(self, other, lengths)
        self.held = [1 - token for token in self.held]
        return taken

    law_follows(AXIS.build("magicdec"))
    monkeypatch.setattr(Tables, "take", others)
    with pytest.raises(AssertionError):
        law_follows(AXIS.build("magicdec"))
