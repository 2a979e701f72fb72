"""draft = clasp: the layers that are left out, against the same programme by calls that leave layers out, and against
all sets of so many layers.
"""

from itertools import combinations

import numpy as np
import pytest

from accel.ir.entries.skips import LIKENESS, SKIPPING, SKIPS, STREAMS
from accel.ir.errors import InputError
from accel.ir.taps import EMBEDS, stream
from accel.runtime.draft import clasp
from accel.runtime.draft.clasp import Clasp, without
from accel.runtime.length.fixed import Fixed
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session

from ...draft_case import plain, rows_of, speculated
from ...prefill_case import TOKENS, built

LAYERS = 5
TABLES = {"draft": {"use": "clasp"}, "depth": {"use": "by-call"}}
NAMES = [EMBEDS, *map(stream, range(LAYERS))]
PROMPTS = TOKENS[:2, :9]


@pytest.fixture(scope="module")
def model():
    return built(f"llama:{LAYERS}", tables=TABLES)


def cosine(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def generated(model, method, temperature=0.0, limit=30):
    rows = rows_of(PROMPTS, Standard(temperature=temperature), limit=limit)
    for i, row in enumerate(rows):
        row.rng = np.random.default_rng(i)
    if method is None:
        return plain(model.session(2), rows), rows
    with model.session(2) as session:
        list(speculated(session, rows, method, "sample-match", length=Fixed(4), model=model))
    return [row.tokens for row in rows], rows


class Case:
    """The last token of a prompt: its streams [L+1,E], and what comes of it without some layers."""

    def __init__(self, model, prompt):
        self.session = model.session()
        got = self.session.step([prompt], want=NAMES)
        self.token = int(prompt[-1])
        self.streams = np.stack([got.extra[name][0, -1] for name in NAMES])

    def behind(self, layer, gone):
        """Its stream [E] behind a layer, from 1, without the layers `gone`."""
        plan = ~np.isin(np.arange(LAYERS), list(gone))
        with self.session.fork() as copy:
            copy.rewind(copy.lengths - 1)
            out = copy.step([[self.token]], want=[stream(layer - 1)], run_layers=plan)
        return out.extra[stream(layer - 1)][0, 0]

    def likeness(self, gone):
        return cosine(self.behind(LAYERS, gone), self.streams[-1])

    def found(self, count, tree=None):
        """The entry's choices [L,N+1] and its cosines [N+1]."""
        with self.session.fork() as copy:
            copy.rewind(copy.lengths - 1)
            inputs = {
                STREAMS: self.streams[None],
                "positions": np.full((1, count + 1), copy.lengths[0]),
                "tree": np.eye(count + 1, dtype=bool)[None] if tree is None else tree,
            }
            out = copy.entry(SKIPPING.name, inputs, count + 1)
        return out[SKIPS][0], out[LIKENESS][0]

    def programme(self, count):
        """The same, cell by cell: the set of each cell, and its cosine in the end."""
        sets = {0: ()}
        for layer in range(1, LAYERS + 1):
            new = {}
            for j in range(min(layer, count) + 1):
                ways = []
                if j <= layer - 1:
                    ways.append(sets[j])
                if j >= 1:
                    ways.append((*sets[j - 1], layer - 1))
                likes = [cosine(self.behind(layer, way), self.streams[layer]) for way in ways]
                new[j] = ways[int(np.argmax(likes))]
            sets = new
        return sets, {j: self.likeness(gone) for j, gone in sets.items() if len(gone) < LAYERS}


@pytest.fixture(scope="module")
def cases(model):
    made = [Case(model, prompt) for prompt in TOKENS[:3, :9]]
    yield made
    for one in made:
        one.session.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_entry_is_the_programme_cell_by_cell(cases, count):
    for case in cases:
        skips, likeness = case.found(count)
        sets, likes = case.programme(count)
        for j in range(count + 1):
            found = tuple(np.flatnonzero(~without(skips, j)))
            assert found == sets[j] and len(found) == j
            assert likeness[j] == pytest.approx(likes[j], abs=1e-4)
        assert likeness[0] == pytest.approx(1, abs=1e-5)


def test_a_set_that_is_run_gives_the_value_and_no_more_than_the_best_of_all(cases):
    gaps = []
    for case in cases:
        for count in (1, 2, 3):
            skips, likeness = case.found(count)
            gone = np.flatnonzero(~without(skips, count))
            every = [case.likeness(some) for some in combinations(range(LAYERS), count)]
            assert likeness[count] == pytest.approx(case.likeness(gone), abs=1e-4)
            assert likeness[count] <= max(every) + 1e-4
            gaps.append((likeness[count] - np.median(every), max(every) - likeness[count]))
    better, worse = np.mean(gaps, 0)
    assert better > 3 * worse, "it is nearer to the best than to one by chance"


def test_rows_that_see_each_other_give_something_else(cases):
    """The control of the mask."""
    _, alone = cases[0].found(3)
    _, seen = cases[0].found(3, np.tril(np.ones((1, 4, 4), bool)))
    assert np.abs(alone - seen).max() > 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_of_plain_decoding_while_plans_change(model, temperature, monkeypatch):
    plans, found = [], clasp._InContext._plans
    monkeypatch.setattr(clasp._InContext, "_plans", lambda *a: plans.append(found(*a)) or plans[-1])
    got, rows = generated(model, Clasp(every=1), temperature)
    assert got == generated(model, None, temperature)[0]
    every = [tuple(layers) for plan in plans for layers in plan.values()]
    assert {len(one) - sum(one) for one in every} == {int(0.5 * LAYERS)}
    assert len(set(every)) > 1 and len(plans) > 5
    assert all(row.drafting["drafted"] > 0 for row in rows)


def test_a_plan_is_that_of_the_newest_token_and_of_its_row(model):
    """Of the prompt's last token, then of the last that stands; in a batch as alone."""
    method = Clasp(every=1)
    with model.session(2) as session:
        session_rows = rows_of(PROMPTS)
        drafters = method.open(session, session_rows, model._context())
        session.prompt(PROMPTS)
        texts = [list(prompt) for prompt in PROMPTS]
        for step in range(3):
            for row, text in zip(session_rows, texts, strict=True):
                row.accept(20 + step, None)
                text.append(20 + step)
            drafters.draft({0: 3, 1: 2}, Fixed(5).open(session_rows, lambda n: 1.0))
            for i, text in enumerate(texts):
                case = Case(model, np.array(text[:-1]))
                want = without(case.found(2)[0], 2)
                assert drafters.says(i)["run_layers"].tolist() == want.tolist()
                case.session.close()
            session.run([[text[-1]] for text in texts])


@pytest.mark.few(1)
@pytest.mark.parametrize("drafts", [1, 4, 1000])
def test_plans_are_found_as_often_as_is_said(model, drafts, monkeypatch):
    asked, made, entry, draft = [], [], Session.entry, clasp._InContext.draft
    monkeypatch.setattr(Session, "entry", lambda *a: asked.append(a[1]) or entry(*a))

    def drafting(self, limits, more):
        trees = draft(self, limits, more)
        made.append(any(map(len, trees.values())))
        return trees

    monkeypatch.setattr(clasp._InContext, "draft", drafting)
    rows = rows_of(PROMPTS[:1], limit=40)
    with model.session() as session:
        list(speculated(session, rows, Clasp(every=drafts), length=Fixed(3), model=model))
    assert set(asked) == {SKIPPING.name} and len(asked) == -(-sum(made) // drafts)


def test_without_skips_all_is_accepted_and_nothing_is_asked(model, monkeypatch):
    monkeypatch.setattr(Session, "entry", None)
    _, rows = generated(model, Clasp(skip=0.0))
    assert all(row.drafting["accepted"] == row.drafting["drafted"] > 0 for row in rows)


def test_an_artifact_finds_the_same(cases):
    made = built(f"llama:{LAYERS}", "onnx", TABLES)
    case = Case(made, TOKENS[0, :9])
    skips, likeness = case.found(2)
    want, likes = cases[0].found(2)
    assert np.array_equal(without(skips, 2), without(want, 2))
    np.testing.assert_allclose(likeness, likes, atol=1e-3)
    case.session.close()


def test_what_is_wrong_is_refused(model):
    rows = rows_of(PROMPTS[:1])
    bare = built(f"llama:{LAYERS}", tables={"depth": {"use": "by-call"}})
    with bare.session() as session, pytest.raises(InputError, match="build with draft = clasp"):
        Clasp().open(session, rows, bare._context())
    whole = built(f"llama:{LAYERS}", tables={})
    with whole.session() as session, pytest.raises(InputError, match="depth = by-call"):
        Clasp().open(session, rows, whole._context())
    with bare.session() as session, pytest.raises(InputError, match="skips"):
        session.entry(SKIPPING.name, {}, 3)
