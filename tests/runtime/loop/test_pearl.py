"""A draft model beside its target, over the toy: the same tokens as without, and as one after the other."""

import gc
import itertools
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.costs import Costs
from accel.runtime.loop import _parallel
from accel.runtime.loop.pearl import Pearl
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard

from ...draft_case import plain, rows_of

PROMPTS = [[5, 17, 200, 3, 88], [9], list(range(40, 61))]
WARM = Standard(temperature=0.6, top_k=20)


class Errs:
    """A backend session whose logits say another token at every `every`-th position; `fails`: at which step."""

    def __init__(self, inner, every, fails):
        self.inner, self.every, self.fails = inner, every, fails

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, tokens, positions, slots, rows, want=(), tree=None, embeds=None):
        self.fails -= 1
        if not self.fails:
            raise MemoryError("no room")
        out = self.inner.step(tokens, positions, slots, rows, want)
        logits = out.logits
        wrong = np.take_along_axis(positions, rows, 1) % self.every == 0
        logits[wrong] = np.roll(logits[wrong], 1, axis=-1)
        return out


def context(toy, every=3, costs=None, fails=0):
    """With a draft model that errs."""

    def session(batch):
        return toy.session(batch=batch, wrap=lambda backend: Errs(backend, every, fails))

    facts = SimpleNamespace(max_batch=toy.batch)
    little = Costs((1, 32), (0.1, 0.2))
    beside = SimpleNamespace(session=session, tokenizer=None, facts=facts, costs=little)
    return DecodeContext(costs=costs, model=SimpleNamespace(draft_model=beside, tokenizer=None))


def run(toy, rows, every=3, ahead=4, **more):
    with toy.session(batch=len(rows)) as session:
        list(Pearl(ahead).tokens(session, rows, context(toy, every, **more)))
        assert session.lengths.tolist() == [row.seen.size - 1 for row in rows]
        return [row.tokens for row in rows], session.stats["calls"]


@pytest.mark.parametrize("sampler", [Standard(), WARM])
@pytest.mark.parametrize("every", [1, 3, 1000])
def test_tokens_are_those_of_plain_decoding(toy, sampler, every):
    want = plain(toy.session(batch=3), rows_of(PROMPTS, sampler, limit=30))
    for ahead in (1, 2, 5):
        rows = rows_of(PROMPTS, sampler, limit=30)
        got, calls = run(toy, rows, every, ahead)
        assert got == want
        drafted, accepted = (
            sum(row.drafting[name] for row in rows) for name in ("drafted", "accepted")
        )
        assert rows[0].seconds["verify"] > 0 and min(rows[0].seconds.values()) >= 0
        assert ahead > 1 or not drafted, "of one token none is ever pending"
        assert every > 1 or not accepted, "what always errs"
        if every == 1000 and sampler.greedy and ahead > 1:
            assert accepted == drafted and calls <= 4 + 30 / ahead, (
                "what never errs runs ahead for good"
            )
    assert [run(toy, rows_of([p], sampler, limit=30))[0][0] for p in PROMPTS] == want


def test_they_are_at_work_at_the_same_time(toy, monkeypatch):
    """The draft waits for the call to begin, and the call for the draft: else they would wait for good."""
    meet = threading.Barrier(2, timeout=20)
    for name in ("_drafted", "_called"):
        method = getattr(_parallel._Rounds, name)

        def waits(self, live, method=method):
            meet.wait()
            return method(self, live)

        monkeypatch.setattr(_parallel._Rounds, name, waits)
    assert run(toy, rows_of(PROMPTS, limit=6))[0] == plain(
        toy.session(batch=3), rows_of(PROMPTS, limit=6)
    )


def test_one_after_the_other_gives_the_same(toy, monkeypatch):
    threaded, calls = run(toy, rows_of(PROMPTS, limit=30))

    class Now:
        def __init__(self, count):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, act, *args):
            done = Future()
            done.set_result(act(*args))
            return done

    monkeypatch.setattr(_parallel, "ThreadPoolExecutor", Now)
    assert run(toy, rows_of(PROMPTS, limit=30)) == (threaded, calls)


def test_what_stands_but_was_not_compared_is_caught(toy, monkeypatch):
    judged = _parallel._Rounds._judged

    def trusts(self, i, logits, ahead):
        stood = judged(self, i, logits, ahead)
        for rest in ahead.values():
            self._pending[i] = rest.tokens
        return stood

    monkeypatch.setattr(_parallel._Rounds, "_judged", trusts)
    rows = rows_of(PROMPTS, limit=30)
    run(toy, rows)
    good = rows_of(PROMPTS, limit=30)
    monkeypatch.undo()
    run(toy, good)
    assert sum(r.drafting["accepted"] for r in rows) / sum(
        r.drafting["drafted"] for r in rows
    ) < sum(r.drafting["accepted"] for r in good) / sum(r.drafting["drafted"] for r in good), (
        "pending tokens that do not follow the last one fall"
    )


@pytest.mark.parametrize(
    "ends", [{"limit": 1}, {"limit": 2}, {"limit": 5}, {"max_context": 24}, {"eos": 4}]
)
def test_rows_end_where_they_would(toy, ends):
    if "eos" in ends:
        ends = {"eos": [plain(toy.session(batch=3), rows_of(PROMPTS))[0][ends["eos"]]]}
    want, got = rows_of(PROMPTS, **ends), rows_of(PROMPTS, **ends)
    plain(toy.session(batch=3), want)
    run(toy, got, 1000)
    assert [(r.tokens, r.finish) for r in got] == [(r.tokens, r.finish) for r in want]


def test_an_iteration_that_is_closed_leaves_a_session_to_go_on_with(toy):
    for stop in (1, 5, 20):
        with toy.session(batch=3) as session:
            rows = rows_of(PROMPTS)
            tokens = Pearl().tokens(session, rows, context(toy))
            list(itertools.islice(tokens, stop))
            tokens.close()
            assert session.lengths.tolist() == [
                row.prompt.size + max(0, len(row.tokens) - 1) for row in rows
            ]
    assert threading.active_count() < 20


def test_what_fails_beside_a_draft_waits_for_it(toy, monkeypatch):
    """An interrupt in a call: the draft's session closes when its thread has ended, and the target's goes on."""
    order, begun, calls = [], threading.Event(), itertools.count()
    called, before = _parallel._Rounds._called, threading.active_count()

    class Slow(Errs):
        def step(self, *given, **options):
            begun.set()
            time.sleep(0.05)
            order.append("drafted")
            return super().step(*given, **options)

        def close(self):
            order.append("closed")
            self.inner.close()

    def interrupted(self, live):
        begun.clear()
        if next(calls) == 3:
            assert begun.wait(20)
            order.append("interrupted")
            raise KeyboardInterrupt
        return called(self, live)

    monkeypatch.setattr(_parallel._Rounds, "_called", interrupted)
    found = context(toy)
    found.model.draft_model.session = lambda batch: toy.session(
        batch=batch, wrap=lambda backend: Slow(backend, 3, 0)
    )
    with toy.session(batch=3) as session:
        rows = rows_of(PROMPTS, limit=40)
        with pytest.raises(KeyboardInterrupt):
            list(Pearl(3).tokens(session, rows, found))
        after = order[order.index("interrupted") :]
        assert after[1] == "drafted" and after[-1] == "closed" and after.count("closed") == 1
        assert threading.active_count() == before
        assert session.lengths.tolist() == [row.seen.size - 1 for row in rows]
        logits = session.run([[row.tokens[-1]] for row in rows])
        for row, each in zip(rows, logits, strict=True):
            np.testing.assert_allclose(each[0], toy.oracle(row.seen)[-1], atol=2e-3)


def test_a_stream_that_is_left_ends_its_thread(toy):
    """Closed or forgotten after any piece; the model goes on."""
    artifact, before = open_artifact(toy.path), threading.active_count()
    tables = {"loop": {"use": "pearl", "ahead": 3}, "draft": {"use": "model"}}

    def made(**more):
        return CompiledModel(OrtBackend(artifact), artifact.facts, artifact=artifact, **more)

    with made(recipe={"tables": tables}, draft_model=made()) as model:
        model._costs = Costs((1, 32), (1.0, 1.0))
        model.draft_model._costs = model._costs
        want = list(model.stream(PROMPTS[0], 12, eos=[]))
        for left in (1, 4, 9):
            for how in (lambda stream: stream.close(), lambda stream: None):
                stream = model.stream(PROMPTS[0], 12, eos=[])
                assert list(itertools.islice(stream, left)) == want[:left]
                assert threading.active_count() == before + (left > 1), "the draft's"
                how(stream)
                del stream
                gc.collect()
                assert threading.active_count() == before
        assert model.generate(PROMPTS[0], 12, eos=[]).tokens == [want]


def test_a_draft_model_that_fails_is_told_of(toy):
    with toy.session(batch=3) as session:
        rows = rows_of(PROMPTS)
        with pytest.raises(MemoryError, match="no room"):
            list(Pearl().tokens(session, rows, context(toy, fails=6)))
        assert session.lengths.tolist() == [row.seen.size - 1 for row in rows]


def test_where_drafts_do_not_pay_it_rests(toy):
    steep = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    rows = rows_of(PROMPTS[:1], limit=60)
    got, _ = run(toy, rows, 2, costs=Costs(steep, tuple(float(n) for n in steep)))
    assert (
        got == plain(toy.session(), rows_of(PROMPTS[:1], limit=60))
        and rows[0].drafting["fallback"] > 10
    )


def test_what_it_cannot_do_without_is_said(toy):
    assert assemble(Recipe.load("pearl")).grade == "lossless"
    with pytest.raises(
        RecipeError,
        match="loop = pearl cannot be combined with draft = iad: .*a draft model is built",
    ):
        assemble(Recipe(tables={"loop": {"use": "pearl"}, "draft": {"use": "iad"}}))
    with pytest.raises(RecipeError, match="loop = pearl needs .draft."):
        assemble(Recipe(tables={"loop": {"use": "pearl"}}))
    with pytest.raises(RecipeError, match="loop.pearl: ahead is 0"):
        Pearl(0)
    with toy.session() as session, pytest.raises(InputError, match="built without its draft model"):
        next(Pearl().tokens(session, rows_of(PROMPTS[:1]), DecodeContext()))
