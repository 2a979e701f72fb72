"""draft = swift: the search of a plan while tokens come, and that neither tokens nor cache know of it."""

import numpy as np
import pytest
import torch

from accel.runtime.draft import swift
from accel.runtime.draft.swift import Search, Swift
from accel.runtime.length.fixed import Fixed
from accel.runtime.sample.standard import Standard

from ...draft_case import plain, rows_of, speculated
from ...prefill_case import TOKENS, built

TABLES = {"draft": {"use": "swift"}, "depth": {"use": "by-branch"}}
PROMPTS = TOKENS[:2, :9]


@pytest.fixture(scope="module")
def model():
    return built("llama:4", tables=TABLES)


def left_out(plan):
    return int((~plan.attn).sum() + (~plan.mlp).sum())


def generated(model, method, temperature):
    rows = rows_of(PROMPTS, Standard(temperature=temperature), limit=40)
    for i, row in enumerate(rows):
        row.rng = np.random.default_rng(i)
    if method is None:
        return plain(model.session(2), rows)
    with model.session(2) as session:
        list(speculated(session, rows, method, "sample-match", length=Fixed(3), model=model))
    return [row.tokens for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_of_plain_decoding_while_it_searches(model, temperature, monkeypatch):
    """By plans that change, of which the best score never falls and which leave out as many branches each."""
    scores, plans, scored = [], [], Search.scored

    def noted(self, score):
        plans.append(self.candidate)
        scored(self, score)
        scores.append(self.score)

    monkeypatch.setattr(Search, "scored", noted)
    method = Swift(window=6)
    assert generated(model, method, temperature) == generated(model, None, temperature)
    assert len(scores) > 5 and scores == sorted(scores)
    assert {left_out(plan) for plan in plans} == {int(0.45 * 4)}
    assert len({tuple(np.concatenate([p.attn, p.mlp])) for p in plans}) > 2
    assert all(p.attn[[0, -1]].all() and p.mlp[[0, -1]].all() for p in plans)


def test_a_score_is_the_share_of_what_came_and_leaves_the_cache_bit_for_bit(model):
    method = Swift(window=6, skip=0.6)
    with model.session(2) as session:
        session.prompt(PROMPTS)
        rows = rows_of(PROMPTS)
        for step in range(9):
            column = np.array([[3 + step], [7 + step]])
            for row, token in zip(rows, column[:, 0], strict=True):
                row.accept(int(token), None)
            if step < 8:
                session.run(column)
        drafters = method.open(session, rows, model._context())
        state = {n: v.clone() for n, v in session._core.backend._state.items()}
        got = drafters._score([0, 1])
        after = session._core.backend._state
        assert all(torch.equal(value, after[name]) for name, value in state.items())
        with session.fork() as other:
            other.rewind(session.lengths - 6)
            tokens = np.stack([row.seen[-7:-1] for row in rows])
            logits = other.run(tokens, **drafters.search.candidate.controls)
        came = np.stack([row.seen[-6:] for row in rows])
        assert got == (logits.argmax(-1) == came).mean()
        one = drafters._score([1])
        assert one == (logits.argmax(-1) == came)[1].mean(), "of the rows that are asked"


def search(**options):
    return Search(Swift(**options), 12)


def test_it_begins_with_every_second_layer():
    plan = search().plan
    assert left_out(plan) == int(20 * 0.45)
    off = np.flatnonzero(~plan.attn).tolist(), np.flatnonzero(~plan.mlp).tolist()
    assert off == ([1, 3, 5, 7, 9], [1, 3, 5, 7])
    assert search(skip=0.0).over and left_out(search(skip=0.0).plan) == 0


def test_a_search_ends_as_the_papers(monkeypatch):
    found = search(enough=0.5)
    for score in (0.2, 0.5):
        found.scored(score)
        assert not found.over
    found.scored(0.51)
    assert found.over and found.score == 0.51
    best = search()
    best.scored(0.3)
    plan = best.plan
    for n in range(swift.FAILURES):
        assert not best.over, n
        best.scored(0.3)
    assert best.over and best.plan is plan
    long = search()
    for n in range(swift.CANDIDATES):
        assert not long.over
        long.scored(n / 2000)
    assert long.over


def test_a_better_plan_is_found_where_there_is_one():
    """Scores by how few attentions are left out; at random it finds plans better than the one it begins with."""
    found = search()
    first = (~found.plan.attn).sum()
    while not found.over:
        found.scored(0.9 - 0.1 * (~found.candidate.attn).sum())
    assert (~found.plan.attn).sum() < first


def test_without_skips_all_is_accepted(model):
    rows = rows_of(PROMPTS)
    with model.session(2) as session:
        list(
            speculated(session, rows, Swift(skip=0.0), "sample-match", length=Fixed(3), model=model)
        )
    assert all(row.drafting["accepted"] == row.drafting["drafted"] > 0 for row in rows)
