"""What rounds hold to: each row's tokens are those that it gets alone, whatever joins and leaves."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import accel
from accel.ir.axis import Axis
from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.costs import Costs
from accel.runtime.decode.rounds import Rounds
from accel.runtime.draft.model import Model
from accel.runtime.length import Base
from accel.runtime.length.fixed import Fixed
from accel.runtime.length.tetris import Tetris
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.loop.fastcot import FastCoT
from accel.runtime.loop.lookahead import Lookahead
from accel.runtime.loop.speculative import Speculative
from accel.runtime.loop.speculative import _Rounds as RoundsOfDrafts
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.guard import Guard
from accel.runtime.verify.sample_match import SampleMatch

from ..draft_case import Known, plain, rows_of
from ..laws.test_draft import BY_ROW
from ..prefill_case import built

AXIS = Axis("draft", "accel.runtime.draft")
SHAPES = Axis("tree", "accel.runtime.tree")
LENGTHS = Axis("length", "accel.runtime.length")
WARM = Standard(temperature=0.8, top_k=20)
MOST = 5  # rows at once
PROMPTS = [
    np.tile(np.random.default_rng(i).integers(1, 50, 3 + i % 4), 4)[: 6 + i] for i in range(8)
]


@pytest.fixture(scope="module")
def model(toy, tmp_path_factory):
    """The toy, for more rows."""
    with accel.load(toy.write(tmp_path_factory.mktemp("rounds") / "toy", max_batch=MOST)) as found:
        yield found


def context(drafter, tree="static", model=None, length=None):
    methods = {"draft": drafter, "verify": SampleMatch(), "length": length or Fixed(4)}
    return DecodeContext({**methods, "tree": SHAPES.build(tree)}, None, model)


def mixed(sampler=WARM):
    """Requests of several lengths, half of them greedy."""
    return [
        rows_of([text], sampler if i % 2 else Standard(), seed=i, limit=3 + 8 * (i % 3))[0]
        for i, text in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def want(model):
    return [plain(model.session(), [row])[0] for row in mixed()]


def scheduled(model, loop, told, rows, seed=0):
    """Let rows join and leave at random."""
    rng, waiting, group = np.random.default_rng(seed), list(rows), None
    while waiting or group is not None:
        if waiting and (
            group is None or len(group.rows) < model.facts.max_batch and rng.random() < 0.5
        ):
            new = loop.rounds(model.session(), [waiting.pop(0)], told)
            list(new.start())
            if group is None:
                group = new
            else:
                group.join(new)
        group.run()
        held = [row.seen.size - 1 for row in group.rows]
        assert group.session.lengths.tolist() == held, "a row of the session holds something else"
        gone = [i for i, row in enumerate(group.rows) if row.finish and rng.random() < 0.7]
        if len(gone) == len(group.rows):
            group.close()
            group.session.close()
            group = None
        elif gone:
            group.leave(gone)
    return [row.tokens for row in rows]


def law(model, loop, told, want, seeds=(0, 1)):
    for seed in seeds:
        assert scheduled(model, loop, told, mixed(), seed) == want, "tokens of another row"


def test_plain_rounds(model, want):
    law(model, Autoregressive(), DecodeContext(), want, seeds=range(3))


@pytest.mark.long
def test_rounds_of_lookahead():
    model = built("llama", tables={"loop": {"use": "lookahead"}})
    found = [plain(model.session(), [row])[0] for row in mixed()[:5]]
    got = scheduled(model, Lookahead(2, 3, 2), DecodeContext(), mixed()[:5])
    assert got == found


@pytest.mark.parametrize("name", [*BY_ROW, "token-recycling", "stand", "stack"])
def test_rounds_of_every_drafter(model, want, name):
    law(model, Speculative(), context(AXIS.build(name)), want, seeds=(0,))


def test_a_draft_models_rows_follow(model, want):
    """The model drafts for itself, so that every token of a greedy row that it drafts stands."""
    own = SimpleNamespace(draft_model=model, tokenizer=None, facts=model.facts)
    rows = mixed()
    assert scheduled(model, Speculative(), context(Model(), "chain", own), rows) == want
    stood = [
        row.drafting["accepted"] == row.drafting["drafted"]
        for row in rows[::2]
        if row.drafting["drafted"]
    ]
    assert stood and all(stood), "a draft follows another row"


def widths(model, costs, *, free=True):
    """Tokens that each row has in the widest call of 1, 2, 4 and 8 rows that run, and of 1 again; all drafts stand."""
    texts = [np.roll(PROMPTS[0], i) for i in range(8)]
    ends = {"limit": 150, "max_context": model.facts.max_context}
    futures = {
        tuple(text.tolist()): plain(model.session(), rows_of([text], **ends))[0] for text in texts
    }
    told = context(Known(futures, free=free), "chain", None, Fixed(31))
    told = DecodeContext(told.methods, costs)
    groups = [
        Speculative().rounds(model.session(), rows_of([text], **ends), told) for text in texts
    ]
    for one in groups:
        list(one.start())
    (group, *others), found = groups, []
    for rows in (1, 2, 4, 8, 1):
        while len(group.rows) < rows:
            group.join(others.pop(0))
        if len(group.rows) > rows:
            group.leave(list(range(rows, len(group.rows))))
        wide = 0
        for _ in range(6):
            before = sum(len(row.tokens) for row in group.rows)
            group.run()
            wide = max(wide, (sum(len(row.tokens) for row in group.rows) - before) // rows)
        found.append(wide)
    group.close()
    group.session.close()
    return found


@pytest.mark.parametrize("free", [True, False])
def test_drafts_are_shorter_the_more_rows_run(toy, tmp_path, monkeypatch, free):
    """Calls of up to 8 tokens cost as one of 1, further ones more than in proportion: all rows together draft into that
    room, whatever the drafter, and a row that is left alone has all of it again.
    """
    costs = Costs((1, 8, 16, 32), (1.0, 1.0, 2.4, 4.8))
    with accel.load(toy.write(tmp_path / "toy", max_batch=8)) as model:
        assert widths(model, costs, free=free) == [8, 4, 2, 1, 8]
        of_batch = Guard.of_batch
        monkeypatch.setattr(Guard, "of_batch", lambda self, batch: of_batch(self, 1))
        assert widths(model, costs, free=free)[3] > 1, "one that does not count the rows"


def compares(name):
    """Whether a length decides for all rows at once."""
    return LENGTHS.method(name).open is not Base.open


@pytest.mark.parametrize("name", filter(compares, LENGTHS.names()))
def test_rows_that_come_and_go_share_a_length(model, want, monkeypatch, name):
    """They get what each gets alone; no call checks more than the budget of the rows that run."""
    own, ran, sums = SimpleNamespace(draft_model=model, tokenizer=None, facts=model.facts), [], []
    length = LENGTHS.build(name)
    called = RoundsOfDrafts._called

    def counted(self, trees, branches):
        ran.append(len(self.rows))
        sums.append((sum(map(len, trees.values())), len(trees)))
        return called(self, trees, branches)

    monkeypatch.setattr(RoundsOfDrafts, "_called", counted)
    told = context(Model(), "chain", own, length)
    law(model, Speculative(), told, want)
    assert min(ran) == 1 and max(ran) > 2, "nothing joins"
    if isinstance(length, Tetris):
        assert all(drafted <= length.tokens * rows for drafted, rows in sums)
        assert {drafted - length.tokens * rows for drafted, rows in sums} > {0}


def test_state_that_stays_behind_is_caught(model, want, monkeypatch):
    drafter = Known({tuple(p.tolist()): tokens for p, tokens in zip(PROMPTS, want, strict=True)}, 3)
    law(model, Speculative(), context(drafter, "chain"), want, seeds=(0,))
    rounds = type(Speculative().rounds(model.session(), mixed()[:1], context(drafter)))
    monkeypatch.setattr(rounds, "left", lambda self, order: None)
    with pytest.raises((AssertionError, IndexError)):
        law(model, Speculative(), context(drafter, "chain"), want)


def test_rows_that_were_not_moved_are_caught(model, want, monkeypatch):
    left = Rounds.leave

    def leave(self, rows):
        left(self, rows)
        self._rows.reverse()

    monkeypatch.setattr(Rounds, "leave", leave)
    with pytest.raises(AssertionError):
        law(model, Autoregressive(), DecodeContext(), want)


def test_a_row_that_fails_fails_alone(model, want):
    """At its first token, and later."""

    for loop, told in (
        (Autoregressive(), DecodeContext()),
        (Speculative(), context(AXIS.build("prompt-lookup"), "chain")),
    ):
        for at in (0, 2):
            rows = mixed(WARM)[:4]
            bad = rows[1]
            good = bad.accept

            def accept(token, logits, bad=bad, good=good, at=at):
                if len(bad.tokens) == at:
                    raise ZeroDivisionError("of this row")
                good(token, logits)

            bad.accept = accept
            with model.session(4) as session:
                rounds = loop.rounds(session, rows, told)
                list(rounds.start())
                while rounds.live:
                    rounds.run()
                rounds.close()
            assert bad.finish == "failed" and isinstance(bad.error, ZeroDivisionError)
            assert [row.tokens for row in (rows[0], *rows[2:])] == [want[0], *want[2:4]]
            assert bad.tokens == want[1][:at]


def test_a_row_goes_on_elsewhere(model, want):
    """Its session as bytes, its tokens and random numbers as JSON: in another session, with a drafter of its own."""
    for loop, told in (
        (Autoregressive(), DecodeContext()),
        (Speculative(), context(AXIS.build("prompt-lookup"), "chain")),
    ):
        for broken in (False, True):
            rows, others, moved = mixed()[1:3], mixed()[1:3], []
            with model.session(2) as session:
                rounds = loop.rounds(session, rows, told)
                list(rounds.start())
                rounds.run()
                for i, (row, other) in enumerate(zip(rows, others, strict=True)):
                    numbers = json.loads(json.dumps(row.numbers()))
                    if broken:
                        numbers["rng"] = other.numbers()["rng"]
                    other.resume(numbers)
                    moved.append(
                        loop.rounds(model.import_row(session.export_row(i)), [other], told)
                    )
                rounds.close()
            group, new = moved
            group.join(new)
            while group.live:
                group.run()
            group.close()
            group.session.close()
            assert ([row.tokens for row in others] == want[1:3]) == (not broken)


def test_what_cannot_join_says_so(model):
    loop = FastCoT(4, 5)
    with model.session() as session, model.session() as other:
        group, new = (loop.rounds(s, mixed()[:1], DecodeContext()) for s in (session, other))
        assert not group.joins and group.rows[0].tokens == []
        list(group.start()), list(new.start())
        with pytest.raises(InputError, match="rows cannot join rounds of this loop"):
            group.join(new)
        group.run(), new.run()
