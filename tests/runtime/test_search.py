"""Loops that go several ways from a prompt, over the toy: what a search by hand finds, ends, and the session."""

import itertools
from collections import Counter
from functools import partial

import numpy as np
import pytest

from accel.ir.errors import InputError, RecipeError
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.logits_processors import Processed
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop.beam_patience import BeamPatience
from accel.runtime.loop.first_finish import FirstFinish
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.transcript import Transcript
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session

from ..draft_case import plain, rows_of

PROMPTS = [[5, 17, 200, 3, 88], [9], list(range(40, 61))]
WARM = Standard(temperature=0.9, top_k=30)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def searched(toy, prompt, eos, limit, beams=4, patience=1.0, length_penalty=1.0, never=False):
    """What the search comes to, step by step and without a cache: (tokens, worth). `never`: until the limit."""
    live, ended = [(0.0, [])], []
    for size in range(1, limit + 1):
        ways = []
        for beam, (total, tokens) in enumerate(live):
            scores = total + log_softmax(toy.oracle(np.array(prompt + tokens))[-1])
            ways += [(-scores[t], beam, t) for t in np.argsort(-scores, kind="stable")[: 3 * beams]]
        ways, held, live = sorted(ways), live, []
        for rank, (cost, beam, token) in enumerate(ways):
            tokens = [*held[beam][1], int(token)]
            if token in eos or size == limit:
                if rank < beams and len(ended) < beams * patience:
                    ended.append((-cost / size**length_penalty, tokens))
            elif len(live) < beams:
                live.append((-cost, tokens))
        if len(ended) >= beams * patience and not never:
            break
    worth = max(w for w, _ in ended)
    return next(tokens for w, tokens in ended if w == worth), worth


def run(loop, session, rows):
    """What comes, row by row."""
    came = [[] for _ in rows]
    for i, token in loop.tokens(session, rows, DecodeContext()):
        came[i].append(token)
    assert came == [row.tokens for row in rows]
    return came


@pytest.fixture(scope="module")
def often(toy):
    """Tokens that searches come by, so that some hypotheses end with them and some do not."""
    rows = rows_of(PROMPTS, limit=10)
    with toy.session(batch=3) as session:
        return [
            t
            for t, _ in Counter(itertools.chain(*run(BeamPatience(), session, rows))).most_common(3)
        ]


CASES = [
    {}, {"beams": 2}, {"beams": 3, "patience": 2.0}, {"beams": 4, "patience": 0.4}, {"length_penalty": 0.0},
    {"beams": 2, "length_penalty": 2.0, "patience": 3.0}, {"patience": 2.5, "length_penalty": -0.5}, {"beams": 1},
]  # fmt: skip


def check_beams(toy, often, engine="ort", cases=CASES):
    finishes = Counter()
    for options, eos in itertools.product(cases, (often[:1], often)):
        want = [searched(toy, prompt, eos, 10, **options)[0] for prompt in PROMPTS]
        with toy.session(engine, batch=3) as session:
            rows = rows_of(PROMPTS, limit=10, eos=eos)
            assert run(BeamPatience(**options), session, rows) == want, options
            check_session(toy, session, rows)
        finishes.update(row.finish for row in rows)
    return finishes


def check_session(toy, session, rows):
    """It has a row for each, and holds a part of what came from its first token on, and nothing else."""
    assert session.batch == len(rows)
    for i, row in enumerate(rows):
        assert session.lengths[i] == 0 or row.prompt.size <= session.lengths[
            i
        ] < row.prompt.size + len(row.tokens)
    seen = [row.seen[: session.lengths[i]] for i, row in enumerate(rows)]
    for got, ids in zip(session.run([[7]] * len(rows)), seen, strict=True):
        np.testing.assert_allclose(
            got[0], toy.oracle(np.array([*ids, 7]))[-1], atol=1e-3, rtol=1e-3
        )


def test_beams_find_what_a_search_by_hand_finds(toy, often):
    finishes = check_beams(toy, often)
    assert finishes["eos"] > 5 and finishes["length"] > 1, finishes


def test_and_on_the_other_target(toy, often):
    check_beams(toy, often, "eager", CASES[:2])


def test_a_beam_that_nothing_may_follow_is_dropped(toy):
    """What remains is what the search comes to where no other text can end."""
    with toy.session(batch=3) as session:
        want = run(BeamPatience(3), session, rows_of(PROMPTS, limit=8))
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, want, strict=True)]

    def held(ids, logits, most=99):
        goes_on = ids.size < most and any(text[: ids.size] == ids.tolist() for text in texts)
        return logits if goes_on else np.full_like(logits, -np.inf)

    rows = rows_of(PROMPTS, limit=8)
    for row in rows:
        row.sampler = Processed(Standard(), toy.vocab, processors=[held])
    with toy.session(batch=3) as session:
        assert run(BeamPatience(3), session, rows) == want
    (row,) = rows_of(PROMPTS[:1], limit=8)
    row.sampler = Processed(Standard(), toy.vocab, processors=[partial(held, most=7)])
    with toy.session() as session, pytest.raises(InputError, match="-inf for every token"):
        run(BeamPatience(3), session, [row])


@pytest.mark.parametrize("broken", ["rows", "order"])
def test_a_search_that_mixes_up_its_rows_is_caught(toy, often, monkeypatch, broken):
    select = Session.select

    def stays(self, rows):
        if len(rows) != self.batch:
            select(self, rows)

    def turned(self, rows):
        select(self, rows if len(rows) != self.batch else np.asarray(rows)[::-1])

    monkeypatch.setattr(Session, "select", stays if broken == "rows" else turned)
    with pytest.raises(AssertionError):
        check_beams(toy, often)


def test_one_beam_is_greedy_decoding(toy, often):
    for penalty in (1.0, 1.3):
        sampler = Standard(repetition_penalty=penalty)
        want = plain(toy.session(batch=3), rows_of(PROMPTS, sampler, eos=often[:1]))
        with toy.session(batch=3) as session:
            assert (
                run(BeamPatience(beams=1), session, rows_of(PROMPTS, sampler, eos=often[:1]))
                == want
            )


def test_more_patience_is_never_worse_and_runs_longer(toy, often):
    """And what it stops for does not change the answer: nothing later is better."""
    calls, before = [], [-np.inf] * len(PROMPTS)
    for patience in (0.25, 1.0, 3.0, 1000.0):
        with toy.session(batch=3) as session:
            rows = rows_of(PROMPTS, limit=10, eos=often)
            run(BeamPatience(patience=patience), session, rows)
            calls.append(session.stats["calls"])
        worth = [searched(toy, prompt, often, 10, patience=patience)[1] for prompt in PROMPTS]
        assert all(a >= b for a, b in zip(worth, before, strict=True))
        before = worth
    assert calls == sorted(calls) and calls[0] < calls[-1]


def test_each_row_finds_what_it_finds_alone(toy, often):
    for loop in (BeamPatience(), FirstFinish()):
        sampler = WARM if isinstance(loop, FirstFinish) else Standard()
        with toy.session(batch=3) as session:
            together = run(loop, session, rows_of(PROMPTS, sampler, eos=often))
        for prompt, want in zip(PROMPTS, together, strict=True):
            with toy.session() as session:
                assert run(loop, session, rows_of([prompt], sampler, eos=often)) == [want]


def samples_of(toy, prompt, count, seed, **ends):
    """Each sample decoded to its end, by itself."""
    rows = [row for _ in range(count) for row in rows_of([prompt], WARM, seed, **ends)]
    for row, rng in zip(rows[1:], np.random.default_rng(seed).spawn(count - 1), strict=True):
        row.rng = rng
    for row in rows:
        plain(toy.session(), [row])
    return rows


@pytest.mark.parametrize("count", [1, 4])
def test_the_first_that_ends_is_the_shortest(toy, often, count):
    eos, lengths = often, []
    for seed in range(4):
        alone = [samples_of(toy, prompt, count, seed, eos=eos, limit=30) for prompt in PROMPTS]
        with toy.session(batch=3) as session:
            rows = rows_of(PROMPTS, WARM, seed, eos=eos, limit=30)
            run(FirstFinish(count), session, rows)
            assert session.stats["calls"] <= 30
            check_session(toy, session, rows)
        for row, samples in zip(rows, alone, strict=True):
            ended = [s for s in samples if s.finish == "eos"]
            if ended:
                assert (
                    row.tokens == min(ended, key=lambda s: len(s.tokens)).tokens
                )  # the first of the shortest
            else:
                assert row.finish == "length" and row.tokens in [s.tokens for s in samples]
            lengths.append((len(row.tokens), len(samples[0].tokens)))
    assert count == 1 or any(few < first for few, first in lengths), "the first sample always won"
    assert all(few <= first for few, first in lengths)


def test_where_none_ends_the_likeliest_is_taken(toy):
    taken = set()
    for seed in range(6):
        samples = samples_of(toy, PROMPTS[0], 3, seed, limit=5)
        means = []
        for s in samples:
            logits = toy.oracle(s.seen)[len(PROMPTS[0]) - 1 : -1]
            means.append(
                np.mean([log_softmax(x)[t] for x, t in zip(logits, s.tokens, strict=True)])
            )
        with toy.session() as session:
            (row,) = rows_of(PROMPTS[:1], WARM, seed, limit=5)
            run(FirstFinish(3), session, [row])
            assert row.tokens == samples[int(np.argmax(means))].tokens and row.finish == "length"
            assert session.lengths.tolist() == [row.seen.size - 1]
        taken.add(int(np.argmax(means)))
    assert len(taken) > 1


def test_a_sample_that_nothing_may_follow_is_dropped(toy):
    """Another one is taken; where none is left, the request fails."""

    def taken(seed, *processors):
        (row,) = rows_of(PROMPTS[:1], WARM, seed, limit=5)
        row.sampler = Processed(WARM, toy.vocab, processors=processors)
        with toy.session() as session:
            run(FirstFinish(3), session, [row])
            assert session.lengths.tolist() == [row.seen.size - 1]
        return row.tokens

    def held(ids, logits, texts):
        dead = ids[len(PROMPTS[0]) :].tolist() in [text[:4] for text in texts]
        return np.full_like(logits, -np.inf) if dead else logits

    dropped = 0
    for seed in range(6):
        samples = [s.tokens for s in samples_of(toy, PROMPTS[0], 3, seed, limit=5)]
        best = taken(seed)
        others = [s for s in samples if s[:4] != best[:4]]
        if others:
            assert taken(seed, partial(held, texts=[best])) in others
            dropped += 1
        with pytest.raises(InputError, match="-inf for every token"):
            taken(seed, partial(held, texts=samples))
    assert dropped > 2


def test_greedy_samples_are_one(toy):
    with toy.session() as session:
        got = run(FirstFinish(4), session, rows_of(PROMPTS[:1]))
        assert session.stats["tokens"] == len(PROMPTS[0]) + 23
    assert got == plain(toy.session(), rows_of(PROMPTS[:1]))


@pytest.mark.parametrize("loop", [BeamPatience(), FirstFinish()])
@pytest.mark.parametrize(
    "ends", [{"limit": n} for n in (1, 2)] + [{"max_context": n} for n in (22, 6, 1)]
)
def test_rows_end_for_want_of_room(toy, loop, ends):
    sampler = WARM if isinstance(loop, FirstFinish) else Standard()
    with toy.session(batch=3) as session:
        rows = rows_of(PROMPTS, sampler, **ends)
        run(loop, session, rows)
        for row, prompt in zip(rows, PROMPTS, strict=True):
            room = min(ends.get("limit", 24), ends.get("max_context", 1000) - len(prompt))
            assert len(row.tokens) == max(room, 0)
            assert row.finish == ("length" if room == ends.get("limit", 24) else "context")


class Stops:
    """A watch that waits for a token to come twice."""

    def __init__(self, token, times=0):
        self.token, self.times = token, times

    def __call__(self, token):
        self.times += token == self.token
        return self.times == 2

    def end(self):
        return False

    def branch(self):
        return Stops(self.token, self.times)


def test_a_stop_string_ends_a_way_like_eos(toy, often):
    for loop, sampler in ((BeamPatience(patience=3.0), Standard()), (FirstFinish(), WARM)):
        found = 0
        for token in often:
            (row,) = rows_of(PROMPTS[:1], sampler, limit=40, watch=Stops(token))
            with toy.session() as session:
                run(loop, session, [row])
                check_session(toy, session, [row])
            assert row.tokens.count(token) == (
                2 if row.finish == "stop" else min(1, row.tokens.count(token))
            )
            found += row.finish == "stop" and row.tokens[-1] == token
        assert found


def test_a_branch_of_a_text_waits_for_what_its_own_tokens_say(toy):
    tokenizer = Tokenizer(toy.tokenizer().to_str().encode())
    ids, others = tokenizer.encode("naïve café — 你好, st"), tokenizer.encode("op it")
    script = Transcript(tokenizer, ("stop",), np.array([], np.int64))
    assert not any(script(t) for t in ids)
    branch, dead = script.branch(), script.branch()
    assert any(branch(t) for t in others) and not any(dead(t) for t in tokenizer.encode(" no"))
    assert any(script(t) for t in others) and script.text([]) == "naïve café — 你好, "
    assert Transcript(tokenizer, (), np.array([], np.int64)).branch() is None


def test_a_search_that_is_closed_leaves_its_session(toy, often):
    """The first row that is done hands out tokens while the others still run."""
    for loop, sampler in ((BeamPatience(beams=2), Standard()), (FirstFinish(2), WARM)):
        with toy.session(batch=3) as session:
            rows = rows_of(PROMPTS, sampler, eos=often, limit=60)
            tokens = loop.tokens(session, rows, DecodeContext())
            next(tokens)
            tokens.close()
            assert sum(not row.tokens for row in rows) > 0, "all ended at once: nothing is tested"
            assert session.batch == 3
            for i, row in enumerate(rows):
                held = session.lengths[i]
                assert held == row.prompt.size if not row.tokens else held < row.seen.size
            got = session.run([[7]] * 3)
            for i, row in enumerate(rows):
                ids = [*row.seen[: session.lengths[i] - 1], 7]
                np.testing.assert_allclose(
                    got[i, 0], toy.oracle(np.array(ids))[-1], atol=1e-3, rtol=1e-3
                )


def test_a_request_that_samples_is_refused(toy):
    with toy.session() as session:
        with pytest.raises(
            InputError, match="beam-patience searches for the most likely text and does not sample"
        ):
            next(BeamPatience().tokens(session, rows_of(PROMPTS[:1], WARM), DecodeContext()))
        assert session.length == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BeamPatience(beams=0), "loop.beam-patience: beams is 0; give 1 to 256"),
        (lambda: BeamPatience(patience=0), "patience is 0; give more than 0"),
        (lambda: BeamPatience(patience=float("nan")), "patience is nan"),
        (lambda: BeamPatience(length_penalty=300.0), "length_penalty is 300.0; give -50 to 50"),
        (lambda: BeamPatience(length_penalty=float("nan")), "length_penalty is nan"),
        (lambda: FirstFinish(0), "loop.first-finish: samples is 0; give 1 to 256"),
    ],
)
def test_options_out_of_range(make, words):
    with pytest.raises(RecipeError, match=words):
        make()


@pytest.fixture(scope="module")
def model(toy):
    artifact = open_artifact(toy.path)
    made = {
        use: CompiledModel(
            OrtBackend(artifact), artifact.facts, tokenizer=Tokenizer(toy.path / "tokenizer.json"), artifact=artifact,
            recipe={"tables": {"loop": {"use": use}}},
        )
        for use in ("beam-patience", "first-finish", "autoregressive")
    }  # fmt: skip
    yield made.__getitem__
    for each in made.values():
        each.close()


@pytest.mark.parametrize("use", ["beam-patience", "first-finish"])
def test_generate_and_stream(model, use):
    """Prompts beyond max_batch, figures, and a stream that is left."""
    options = {"temperature": 0.8, "seed": 3} if use == "first-finish" else {}
    prompts = [*PROMPTS, [1, 2], [3, 4, 5]]
    out = model(use).generate(prompts, 12, eos=[], **options)
    assert all(len(tokens) == 12 for tokens in out.tokens) and out.stats["finish"] == ["length"] * 5
    assert out.stats["calls"] == 2 * 12 and out.stats["speculation"] is None
    assert out.stats["tokens_per_second"] < 1e6 and 0 < out.stats["prefill_seconds"]
    assert (
        out.stats["kv_bytes"]
        > 3 * model("autoregressive").generate(prompts, 12, eos=[]).stats["kv_bytes"]
    )
    with model(use).stream(PROMPTS[0], 12, eos=[], **options) as stream:
        assert next(stream) == out.tokens[0][0]
    assert list(model(use).stream(PROMPTS[0], 12, eos=[], **options)) == out.tokens[0]
    assert model(use).generate("for i in", 4).text is not None
