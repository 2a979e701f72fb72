"""What drafters hold to that run the model itself for less: on a small model, drafts of valid ids that are no longer
than was asked for and that rows do not share, and a session that is afterwards as if nothing had been drafted.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from accel.ir.axis import Axis
from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft._by_self import BySelf
from accel.runtime.draft.del_exit import DelExit
from accel.runtime.draft.layerskip import LayerSkip
from accel.runtime.length.fixed import Fixed
from accel.runtime.sample import Distribution
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree import NONE
from accel.runtime.tree.chain import Chain
from accel.runtime.verify import Verdict
from accel.runtime.verify.sample_match import SampleMatch

from ..draft_case import rows_of
from ..prefill_case import TOKENS, built
from ..s3d_case import tables

AXIS = Axis("draft", "accel.runtime.draft")
ITSELF = [name for name in AXIS.names() if AXIS.method(name).needs]
PROMPT, ROUNDS = 12, 4
LIMITS = ({0: 3, 1: 1}, {1: 4}, {}, {0: 2, 1: 5})


def model_of(method):
    if method.use == "s3d":  # it cannot do without its part
        return built("llama", tables=tables())
    needs = {axis: {"use": use} for axis, use in method.needs.items()}
    return built("llama", tables={"draft": {"use": method.use}, **needs})


def opened(method, model, prompts):
    """A session that holds prompts, their rows, and its drafters."""
    session = model.session(len(prompts))
    rows = rows_of(prompts)
    methods = {"tree": Chain(), "verify": SampleMatch(), "length": Fixed(9)}
    drafters = method.open(session, rows, DecodeContext(methods, None, model))
    session.prompt(prompts)
    for row, line in zip(rows, prompts, strict=True):
        row.accept(int(line[0]) + 1, None)
    return session, rows, drafters


def drafted(method, model, prompts, numbers):
    """Of rounds, the drafts of rows that are `numbers` in `LIMITS`; each round takes one token."""
    session, rows, drafters = opened(method, model, prompts)
    paces, found = Fixed(9).open(rows, unmeasured_cost), []
    with session:
        for limits in LIMITS:
            mine = {i: limits[n] for i, n in enumerate(numbers) if n in limits}
            lengths = session.lengths.tolist()
            with session.fork() as never:
                trees = drafters.draft(mine, paces)
                assert session.lengths.tolist() == lengths, "it left tokens"
                column = np.array([[row.seen[-1]] for row in rows])
                got, want = session.run(column), never.run(column)
            assert np.array_equal(got, want), "it changed what the cache holds"
            assert trees.keys() <= mine.keys()
            for i, tree in trees.items():
                assert len(tree) <= mine[i], "too long"
                assert (
                    not len(tree)
                    or 0 <= tree.tokens.min() <= tree.tokens.max() < model.facts.vocab_size
                )
            for i, row in enumerate(rows):
                tree = trees.get(i, NONE)
                drafters.observe(i, tree, Verdict((), int(got[i, 0].argmax())), got[i])
                row.accept(int(got[i, 0].argmax()), None)
            found.append([trees.get(i, NONE).tokens.tolist() for i in range(len(rows))])
    return found


def law(method):
    model, prompts = model_of(AXIS.build(method.use)), TOKENS[:2, :PROMPT]
    both = drafted(method, model, prompts, (0, 1))
    assert any(map(any, both)), "it never drafts"
    for n in (0, 1):
        alone = drafted(method, model, prompts[n : n + 1], (n,))
        assert [round_[n] for round_ in both] == [round_[0] for round_ in alone], (
            "rows share something"
        )


@pytest.mark.parametrize("name", ITSELF)
def test_every_drafter_that_runs_the_model_itself(name):
    law(AXIS.build(name))


def turn(session, rows, drafters):
    """A round in which each row drafts and takes a token: the drafts."""
    limits = dict.fromkeys(range(len(rows)), 3)
    trees = drafters.draft(limits, Fixed(9).open(rows, unmeasured_cost))
    logits = session.run(np.array([[row.seen[-1]] for row in rows]))
    for i, row in enumerate(rows):
        drafters.observe(i, trees[i], Verdict((), int(logits[i, 0].argmax())), logits[i])
        row.accept(int(logits[i, 0].argmax()), None)
    return [trees[i].tokens.tolist() for i in limits]


def law_of_joins(method):
    """Rows that join after a round of their own, and those that stay behind others, draft as each does alone."""
    model, prompts, alone = model_of(AXIS.build(method.use)), TOKENS[:3, :PROMPT], []
    for n in range(3):
        one = opened(method, model, prompts[n : n + 1])
        with one[0]:
            alone.append([turn(*one)[0] for _ in range(4)])
            one[2].close()
    (session, rows, drafters), *others = (
        opened(method, model, prompts[i:j]) for i, j in ((0, 1), (1, 3))
    )
    with session:
        found = [turn(session, rows, drafters) + turn(*others[0])]
        (other, more, theirs) = others[0]
        session.join(other)
        rows.extend(more)
        drafters.join(theirs)
        found += [turn(session, rows, drafters) for _ in range(2)]
        order = session.leave(0)
        drafters.leave(order)
        rows[:] = [rows[i] for i in order]
        last = turn(session, rows, drafters)
        drafters.close()
    assert found == [[alone[n][r] for n in range(3)] for r in range(3)], "rows that joined"
    assert last == [alone[n][3] for n in order], "rows that stayed"


@pytest.mark.parametrize("name", ITSELF)
def test_rows_join_and_leave_every_drafter(name):
    law_of_joins(AXIS.build(name))


@dataclass(frozen=True)
class Mixed(DelExit):
    """Who joins drafts by what is known of another row."""

    @property
    def use(self):
        return "del-exit"

    def open(self, session, rows, context):
        drafters = super().open(session, rows, context)
        drafters.leave = lambda order: None
        drafters.says = lambda row: drafters._plans[min(row, 1)]
        return drafters


def test_one_that_mixes_rows_is_caught():
    with pytest.raises(AssertionError, match="rows that"):
        law_of_joins(Mixed())


@dataclass(frozen=True)
class Broken(LayerSkip):
    how: str = ""

    @property
    def use(self):
        return "layerskip"

    def open(self, session, rows, context):
        changed = {name: way for name, way in vars(Wrong).items() if name == self.how}
        kind = type("Broken", (BySelf,), changed)
        return kind(session, rows, context, 0.5, run_layers=self.layers(context))


class Wrong(BySelf):
    """Mistakes, each in place of what it is called by."""

    def done(self):
        """It leaves what it drafted."""

    def most(self, row, limit):
        return limit + 1

    def said(self, row, logits, seen):
        """It says ids beyond the vocabulary."""
        found = self.rows[row].sampler.distribution(logits, seen)
        return Distribution(found.tokens + self._vocab, found.weights)

    def further(self, tokens):
        """It says of each row what follows the first one's."""
        logits = BySelf.further(self, tokens)
        return np.repeat(logits[:1], len(logits), 0)

    def first(self, rows):
        """A draft begins by writing the last token once more."""
        logits = BySelf.first(self, rows)
        self._session.rewind(self._held - 1)
        tokens = np.array([[row.seen[-1]] for row in self.rows])
        self._session.run(tokens)
        return logits


@pytest.mark.parametrize("how", ["done", "most", "said", "further", "first"])
def test_a_broken_one_is_caught(how):
    law(Broken())
    with pytest.raises((AssertionError, InputError)):  # what is no id, the session refuses too
        law(Broken(how=how))


def test_what_a_draft_says_changes_between_drafts_only():
    """A drafter that changes its plan while it drafts; its calls say the first until the draft is whole."""
    plans = [np.array([True, False, True]), np.array([True, False, False])]

    class Changes(BySelf):
        def further(self, tokens):
            said.append(self._saying[0]["run_layers"].tolist())
            logits = BySelf.further(self, tokens)
            self.less = {"run_layers": plans[1]}
            return logits

    said, method = [], LayerSkip()
    object.__setattr__(method, "open", lambda s, r, c: Changes(s, r, c, 0.5, run_layers=plans[0]))
    session, rows, drafters = opened(method, model_of(LayerSkip()), TOKENS[:2, :PROMPT])
    with session:
        for _ in range(2):
            drafters.draft({0: 2, 1: 2}, Fixed(9).open(rows, unmeasured_cost))
    one, other = (plan.tolist() for plan in plans)
    assert said == [one] * 2 + [other] * 2


@pytest.mark.parametrize("swapped", [False, True])
def test_rows_may_say_different_things(swapped):
    """Each drafts as it does alone by its own plan; the control: by the other's it does not."""
    plans = [{"run_layers": np.arange(3) < n} for n in (1, 2)]

    class Apart(BySelf):
        def says(self, row):
            return self.less[row]

    class Alone(BySelf):
        pass

    def drafts(kind, prompts, **less):
        method = LayerSkip()
        object.__setattr__(method, "open", lambda s, r, c: kind(s, r, c, 0.5, **less))
        session, rows, drafters = opened(method, model_of(LayerSkip()), prompts)
        if kind is Apart:
            drafters.less = plans[::-1] if swapped else plans
        with session:
            limits = dict.fromkeys(range(len(rows)), 6)
            trees = drafters.draft(limits, Fixed(9).open(rows, unmeasured_cost))
        return [trees[i].tokens.tolist() for i in limits]

    prompts = TOKENS[:2, :PROMPT]
    alone = [drafts(Alone, prompts[i : i + 1], **plans[i])[0] for i in (0, 1)]
    assert (drafts(Apart, prompts) == alone) is not swapped
