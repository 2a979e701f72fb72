"""What drafting loses where drafts fall, and gains where they stand, by a clock that calls of the model move."""

import numpy as np
import pytest

from accel.runtime.backends import clock
from accel.runtime.decode.costs import Costs
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session
from accel.runtime.speculation import guard as _guard
from accel.runtime.tree import Tree

from ..draft_case import Known, Says, plain, rows_of, speculated

NEW = 96
PROMPT = 24
CURVES = {  # what a call of 1, 8 and 256 tokens takes, in seconds
    "flat": (1.0, 1.1, 2.0),
    "usual": (1.0, 1.5, 24.0),
    "steep": (1.0, 5.0, 160.0),
}


class Time:
    """Virtual seconds: calls take what a curve says of their tokens, `looks` are the seconds of each draft."""

    def __init__(self, monkeypatch, curve, looks=0.0):
        self.costs = Costs((1, 8, 256), CURVES[curve])
        self.now, self.calls, self.looks = 0.0, 0, looks
        monkeypatch.setattr(clock, "now", lambda: self.now)
        monkeypatch.setattr(clock, "host_now", lambda: self.now)
        run = Session.run

        def timed(session, tokens, *args, **more):
            self.now += self.costs.ratio(np.size(tokens))
            self.calls += 1
            return run(session, tokens, *args, **more)

        monkeypatch.setattr(Session, "run", timed)


def repeating(toy, batch):
    """Prompts of one run of tokens again and again."""
    return [[i + 1, i + 5, i + 9, i + 2] * (PROMPT // 4) for i in range(batch)]


def taken(toy, prompts, time, drafter):
    """Virtual seconds of the steps after the prompts, in plain ones; and the rows."""
    rows = rows_of(prompts, limit=NEW)
    with toy.session(batch=len(prompts)) as session:
        for i, _ in enumerate(speculated(session, rows, drafter, costs=time.costs)):
            if i == len(prompts) - 1:
                time.now = 0.0
    each = time.costs.ratio(len(prompts))
    return time.now / ((NEW - 1) * each), rows


@pytest.fixture(scope="module")
def found(toy):
    prompts = repeating(toy, 8)
    return {
        batch: dict(
            zip(
                map(tuple, prompts[:batch]),
                plain(toy.session(batch=batch), rows_of(prompts[:batch], limit=NEW)),
                strict=True,
            )
        )
        for batch in (1, 8)
    }


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("free", [True, False])
def test_drafts_that_never_stand_lose_little(toy, found, monkeypatch, curve, batch, free):
    """Whether the drafter is watched or tried; also one whose drafts take a third of a step each."""
    prompts = repeating(toy, batch)
    for looks in (0.0, 0.3):
        time = Time(monkeypatch, curve, looks)
        wrong = Known(found[batch], wrong=1, free=free)
        share, rows = taken(toy, prompts, time, timed(wrong, time))
        assert [row.tokens for row in rows] == list(found[batch].values())
        assert share < 1.05, (looks, share)
        monkeypatch.undo()


def timed(drafter, time):
    """A drafter whose drafts take time."""
    begin = drafter.begin

    def slow(prompt, store=None):
        one = begin(prompt, store)
        draft = one.draft

        def later(seen, limit):
            time.now += time.looks
            return draft(seen, limit)

        one.draft = later
        return one

    object.__setattr__(drafter, "begin", slow)  # frozen
    return drafter


def test_a_guard_that_lets_drafts_lose_much_is_caught(toy, found, monkeypatch):
    monkeypatch.setattr(_guard, "LOSS", 30.0)
    monkeypatch.setattr(_guard, "TRIAL", 30)
    time = Time(monkeypatch, "usual")
    share, _ = taken(toy, repeating(toy, 8), time, Known(found[8], wrong=1, free=False))
    assert share > 1.05


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("told", [True, False])
def test_drafts_that_stand_are_made_at_once_where_the_prompt_says_so(toy, monkeypatch, batch, told):
    """A text that goes on as its prompt does: drafts begin with the first step, or else within four tokens."""
    prompts, time = repeating(toy, batch), Time(monkeypatch, "flat")
    rows = rows_of(prompts, Cycles(), limit=NEW)

    def says(seen, limit):
        return Tree.chain(seen[-4:][:limit] if told or seen.size > PROMPT else [])

    with toy.session(batch=batch) as session:
        list(speculated(session, rows, Says(says), "sample-match", costs=time.costs))
    assert all(row.tokens == (4 * row.prompt.tolist())[:NEW] for row in rows)
    assert time.calls < NEW / 2
    first = rows[0].drafting["fallback"]
    assert first == 0 if told else 0 < first <= 4


class Cycles(Standard):
    """Goes on as the text repeats itself every four tokens."""

    def scores(self, logits, seen):
        return super().scores(np.eye(logits.size, dtype=np.float32)[seen[-4]] * 99, seen)

    def choices(self, logits):
        return None
