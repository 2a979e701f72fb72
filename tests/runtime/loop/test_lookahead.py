"""Lookahead decoding: the same tokens as without, what its window makes of its guesses, ends, and what it goes with."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import InputError, RecipeError
from accel.ir.recipe import Recipe, bundled
from accel.passes.state.trees import Trees
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.costs import Costs
from accel.runtime.decode.row import STAGES
from accel.runtime.loop import lookahead
from accel.runtime.loop.lookahead import Lookahead
from accel.runtime.sample.standard import Standard
from accel.runtime.session.observers.observer import Capabilities

from ...draft_case import against, plain, rows_of
from ...kv_case import table
from ...prefill_case import built, module

LOOP = {"loop": {"use": "lookahead"}}
SHAPES = [(2, 4, 3), (1, 2, 1), (2, 6, 1)]
WARM = Standard(temperature=0.7, top_k=20)


def texts(seed=0):
    """Three prompts, the first of which repeats itself."""
    rng = np.random.default_rng(seed)
    return [np.tile(rng.integers(3, 50, 6), 3).tolist(), rng.integers(3, 50, 9).tolist(), [7]]


def run(model, rows, shape=(2, 4, 3), costs=None):
    """The rows' tokens; the session holds them, but for the last."""
    with model.session(len(rows)) as session:
        for _ in Lookahead(*shape).tokens(session, rows, DecodeContext(costs=costs)):
            pass
        assert session.lengths.tolist() == [row.seen.size - 1 for row in rows]
        return [row.tokens for row in rows], session.stats["calls"]


@pytest.mark.long
def test_tokens_are_those_of_plain_decoding():
    model, stood = built("llama", tables=LOOP), 0
    for seed, sampler in enumerate((Standard(), WARM)):
        want = plain(model.session(3), rows_of(texts(seed), sampler, seed))
        for shape in SHAPES:
            rows = rows_of(texts(seed), sampler, seed)
            assert run(model, rows, shape)[0] == want
            assert min(rows[0].seconds[stage] for stage in STAGES) > 0, "where its time goes"
            stood += sum(row.drafting["accepted"] for row in rows)
    assert stood, "no n-gram ever stood"


def test_each_row_gets_what_it_gets_alone():
    model = built("llama", tables=LOOP)
    together, _ = run(model, rows_of(texts()))
    assert [run(model, rows_of([prompt]))[0][0] for prompt in texts()] == together


def windows(model, rounds=9):
    """(the tokens before a call, its window's grid, the window after it) of each call of a row."""
    found = []

    class Spied(lookahead._Window):
        def call(self, row):
            self.seen = row.seen.copy()
            return super().call(row)

        def learn(self, call, logits):
            super().learn(call, logits)
            found.append((self.seen, call.grid, self._guesses))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lookahead, "_Window", Spied)
        run(model, rows_of(texts()[:1], limit=rounds), (3, 4, 2))
    return found


def law_of_windows(model):
    """A window's newest row is what the model says after each column's guesses, without any cache."""
    widths = []
    for seen, grid, guesses in windows(model):
        widths.append(grid.shape)
        assert seen[-1] == grid[0, 0]
        ways = [
            np.concatenate([seen[:-1], grid[0, : j + 1], grid[1:, j]]) for j in range(grid.shape[1])
        ]
        want = [int(model.logits(way[None])[0, -1].argmax()) for way in ways]
        warm = len(grid) < 3
        assert guesses[-1].tolist() == (want[1:] if warm else want)
    assert widths[:3] == [(1, 5), (2, 4), (3, 3)] and set(widths[3:]) == {(3, 3)}


def test_the_window_is_what_the_model_makes_of_it():
    law_of_windows(built("llama", tables=LOOP))


@pytest.mark.parametrize("broken", ["causal", "alone"])
def test_a_window_that_sees_too_much_or_too_little_is_caught(monkeypatch, broken):
    def sight(rows, columns):
        size = rows * columns
        return np.tri(size, dtype=bool) if broken == "causal" else np.eye(size, dtype=bool)

    monkeypatch.setattr(lookahead, "_sight", sight)
    with pytest.raises(AssertionError):
        law_of_windows(built("llama", tables=LOOP))


def test_what_is_guessed_does_not_change_what_comes(monkeypatch):
    """Guesses that are all wrong cost calls, and no token; nor do n-grams of the text that are."""
    model = built("llama", tables=LOOP)
    want = plain(model.session(3), rows_of(texts()))
    add = lookahead._Window._add

    def other(self, key, gram):
        add(self, key, tuple((t + 1) % 50 for t in gram))

    monkeypatch.setattr(lookahead._Window, "_add", other)
    got, calls = run(model, rows_of(texts()))
    assert got == want and calls > 20


def test_n_grams_are_kept_by_their_first_token_the_newest_last():
    (row,) = rows_of([[1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 3]])
    window = lookahead._Window(row, Lookahead(2, 3, 2))
    assert list(window._pool[1]) == [(2, 5), (2, 3)] and list(window._pool[2]) == [(4, 1), (5, 1)]
    row.accept(1, None)
    window.note(row.seen, 1)
    assert list(window._pool[2]) == [(5, 1), (3, 1)]
    call = window.call(row)
    assert call.tree.tokens.tolist() == [2, 3, 5] and call.tree.parents.tolist() == [-1, 0, 0]
    assert call.tokens.size == call.grid.size + 3 <= Lookahead(2, 3, 2).widest


def test_rows_go_on_without_guesses_that_were_not_kept():
    model = built("llama", tables=LOOP)
    with model.session() as session:
        session.run([[4, 5, 6]])
        session.guess([[7, 8]], np.tri(2, dtype=bool)[None])
        session.select([0, 0])
        with pytest.raises(InputError, match="no tree to accept from"):
            session.keep([[0], [0]])
        got = session.run([[9], [9]])
    assert np.abs(got[:, 0] - model.logits([[4, 5, 6, 9]])[0, -1]).max() < 1e-4


ENDS = [*({"limit": n} for n in (1, 2, 5)), *({"max_context": n} for n in (20, 19, 64)), {"eos": 4}]


@pytest.mark.few(3)
@pytest.mark.parametrize("ends", ENDS)
def test_rows_end_where_they_would(ends):
    """Also within an n-gram that stands, and where a call would be larger than the context left."""
    model = built("llama", tables=LOOP)
    if "eos" in ends:
        ends = {"eos": [plain(model.session(3), rows_of(texts()))[0][ends["eos"]]]}
    ends = {"limit": 60} | ends
    want, got = rows_of(texts(), **ends), rows_of(texts(), **ends)
    plain(model.session(3), want)
    with model.session(3) as session:
        list(Lookahead().tokens(session, got, DecodeContext()))
    assert [(r.tokens, r.finish) for r in got] == [(r.tokens, r.finish) for r in want]


def test_an_iteration_that_is_closed_leaves_a_session_to_go_on_with():
    model = built("llama", tables=LOOP)
    want = plain(model.session(3), rows_of(texts()))
    for stop in (1, 4, 9, 20):
        rows = rows_of(texts())
        with model.session(3) as session:
            tokens = Lookahead().tokens(session, rows, DecodeContext())
            list(itertools.islice(tokens, stop))
            tokens.close()
            assert session.lengths.tolist() == [
                row.prompt.size + max(0, len(row.tokens) - 1) for row in rows
            ]
            if all(row.tokens for row in rows):
                logits = session.run([[row.tokens[-1]] for row in rows])
                for row, tokens_of, each in zip(rows, want, logits, strict=True):
                    done = len(row.tokens)
                    assert done == len(tokens_of) or int(each[0].argmax()) == tokens_of[done]


def test_where_calls_cost_too_much_it_rests():
    model = built("llama", tables=LOOP)
    steep = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    dear = Costs(steep, tuple(float(n) for n in steep))
    rows = rows_of(texts(1)[1:2], limit=40, max_context=64)
    got, _ = run(model, rows, costs=dear)
    assert got == plain(model.session(), rows_of(texts(1)[1:2], limit=40, max_context=64))
    assert rows[0].drafting["fallback"] > 20


def test_calls_may_be_wider_than_those_whose_cost_was_measured():
    """The paper's window, whose calls are of up to 120 tokens."""
    model = built("llama", tables=LOOP)
    rows = rows_of(texts()[:2], limit=30, max_context=256)
    got, _ = run(model, rows, (15, 5, 15), Costs((1, 512), (1.0, 1.0)))
    assert got == plain(model.session(2), rows_of(texts()[:2], limit=30, max_context=256))
    assert rows[0].drafting["drafted"]


@pytest.mark.long
def test_batch_invariant_tokens_are_those_without():
    models = [
        accel.optimize(module("llama"), recipe, max_context=64, max_batch=3)
        for recipe in (["lookahead", "batch-invariant"], "batch-invariant")
    ]
    with models[0] as drafts, models[1] as without:
        for options in ({}, {"temperature": 0.8, "seed": 2}):
            want = without.generate(texts(), 30, eos=[], **options)
            got = drafts.generate(texts(), 30, eos=[], **options)
            assert got.tokens == want.tokens
            assert want.stats["speculation"] is None and got.stats["speculation"] is not None


REFUSED = {"h2o", "trim-kv", "calm", "edge", "quest", "paged-prefix", "pie", "critiprefill"}


def test_what_cannot_take_guesses_back_is_refused_before_any_work():
    """By what the methods declare."""
    refused, declared = set(), set()
    for name in bundled():
        recipe = Recipe.load(name)
        use = recipe.tables.get("loop", {}).get("use", "autoregressive")
        if use == "autoregressive" and "draft" not in recipe.tables:
            declared |= {name} if against(recipe, "lookahead") else set()
            try:
                plan = assemble(Recipe(tables={**recipe.tables, **LOOP}))
                assert any(isinstance(step, Trees) for step in plan.passes) and plan.grade
            except RecipeError as error:
                assert re.search(
                    "cannot be combined with.*loop = lookahead|loop = lookahead cannot", str(error)
                )
                refused.add(name)
    assert refused == declared and refused > REFUSED


def test_only_what_guesses_takes_trees():
    for name in ("base", "beam-patience", "prompt-lookup", "freedave"):
        assert not any(isinstance(step, Trees) for step in assemble(Recipe.load(name)).passes)


def test_calls_wider_than_a_session_allows_are_refused():
    session = SimpleNamespace(capabilities=Capabilities(width=32))
    with pytest.raises(InputError, match="lookahead: window = 12, ngram = 4 .* only up to 32"):
        next(Lookahead(12, 4).tokens(session, rows_of(texts()), DecodeContext()))


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 9, 1), (4, 5, 2), (2, 6, 1)])
def test_a_call_is_no_wider_than_is_said(shape):
    widths = []
    method = Lookahead(*shape)
    (row,) = rows_of([np.tile(np.arange(3, 9), 5)])
    row.accept(5, None)
    window = lookahead._Window(row, method)
    for _ in range(12):
        call = window.call(row)
        window.learn(call, np.zeros((call.grid.shape[1], 50), np.float32))
        widths.append(call.grid.size)
    assert max(widths) + method.guesses * (method.ngram - 1) == method.widest


@pytest.mark.long
def test_it_goes_with_what_keeps_calls_alike():
    snapkv = {"kv.score": table("snapkv"), "kv.budget": table("uniform", tokens_kept=8)}
    model = built("llama", tables={**snapkv, "kv.codec": {"use": "kv-int8"}, **LOOP})
    assert run(model, rows_of(texts()))[0] == plain(model.session(3), rows_of(texts()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((0,), "window is"),
        ((1, 1), "ngram is"),
        ((1, 2, 0), "guesses is"),
        (
            (128, 5, 8),
            "window = 128, ngram = 5 .* up to 544 tokens; give smaller ones, for up to 512",
        ),
    ],
)
def test_options_out_of_range(options, said):
    with pytest.raises(RecipeError, match=f"loop.lookahead: {said}"):
        Lookahead(*options)
