"""What generate tells beside the text, and several samples of a prompt: log-probabilities, ends, one prefill."""

import math

import numpy as np
import pytest

from accel.ir.errors import InputError
from accel.runtime.decode import prompts as prompts_module
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.logprobs import Logprob, TopLogprobs
from accel.runtime.decode.row import Row
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.loop.beam_patience import BeamPatience
from accel.runtime.loop.fastcot import FastCoT
from accel.runtime.loop.first_finish import FirstFinish
from accel.runtime.loop.jacobi import Jacobi
from accel.runtime.loop.lookahead import Lookahead
from accel.runtime.model.load import load
from accel.runtime.sample.standard import Standard
from accel.runtime.verify import Target

from ..draft_case import plain, rows_of, speculated
from ..prefill_case import built
from ..test_speculation import CASES, texts
from .loop.test_pearl import Pearl, context

PROMPTS = [[5, 17, 200, 3, 88], [9], [7, 8] * 12]
WARM = Standard(temperature=0.9, top_k=40)


def told(toy, prompt, tokens, count):
    """Log-probabilities by the cache-free oracle: of each token and of the likeliest ones, with their ranks."""
    for n, token in enumerate(tokens):
        logits = toy.oracle(np.array([*prompt, *tokens[:n]]))[-1].astype(np.float64)
        line = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        order = np.argsort(-line, kind="stable").tolist()
        chosen = [token, *(t for t in order[:count] if t != token)]
        yield {t: (line[t], order.index(t) + 1) for t in chosen}


def check(toy, rows, count=3):
    for row in rows:
        assert len(row.logprobs) == len(row.tokens) > 0
        for got, want in zip(row.logprobs, told(toy, row.prompt, row.tokens, count), strict=True):
            assert list(got) == list(want) and [one.rank for one in got.values()] == [
                r for _, r in want.values()
            ]
            np.testing.assert_allclose(
                [one.logprob for one in got.values()], [v for v, _ in want.values()], atol=2e-3
            )


LOOPS = {
    "speculative": lambda toy, session, rows: speculated(session, rows, PromptLookup(ngram=1), "sample-match"),
    "spec-chain": lambda toy, session, rows: speculated(session, rows, PromptLookup(ngram=1)),
    "pearl": lambda toy, session, rows: Pearl(3).tokens(session, rows, context(toy)),
    "fastcot": lambda toy, session, rows: FastCoT(4, 5).tokens(session, rows, DecodeContext()),
    "jacobi": lambda toy, session, rows: Jacobi(5).tokens(session, rows, DecodeContext()),
    "first-finish": lambda toy, session, rows: FirstFinish(3).tokens(session, rows, DecodeContext()),
    "beam-patience": lambda toy, session, rows: BeamPatience(3).tokens(session, rows, DecodeContext()),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_tells_what_the_model_gave(toy, name):
    """Before temperature, top-k, penalty: of the model's own distribution."""
    sampler = Standard(repetition_penalty=1.3) if name == "beam-patience" else WARM
    rows = rows_of(PROMPTS, sampler, score=TopLogprobs(3), eos=(0,))
    with toy.session(batch=3) as session:
        list(LOOPS[name](toy, session, rows))
    check(toy, rows)


def test_trees_and_lookahead_tell_it_too():
    model = built("llama", tables={"loop": {"use": "lookahead"}})
    plainly, guessed = (rows_of(texts(50), score=TopLogprobs(2), max_context=64) for _ in range(2))
    plain(model.session(3), plainly)
    with model.session(3) as session:
        list(Lookahead(2, 4, 3).tokens(session, guessed, DecodeContext()))
    assert sum(row.drafting["accepted"] for row in guessed)
    for row, want in zip(guessed, plainly, strict=True):
        assert [list(d) for d in row.logprobs] == [list(d) for d in want.logprobs]
        for got, due in zip(row.logprobs, want.logprobs, strict=True):
            assert all(math.isclose(got[t].logprob, due[t].logprob, abs_tol=1e-3) for t in due)


def test_logprobs_of_the_wrong_place_are_caught(toy, monkeypatch):
    """The control: each token of a draft with the logits after it."""
    monkeypatch.setattr(
        Target, "taken",
        lambda self, verdict: [
            *((int(self.tree.tokens[n]), self._logits[n + 1]) for n in verdict.path),
            (verdict.token, self._logits[verdict.path[-1] + 1 if verdict.path else 0]),
        ],
    )  # fmt: skip
    with pytest.raises(AssertionError):
        test_every_loop_tells_what_the_model_gave(toy, "speculative")


def test_a_loop_that_cannot_tell_is_refused():
    (row,) = rows_of([[1, 2]], score=TopLogprobs(0))
    with pytest.raises(InputError, match="gives no logprobs"):
        row.accept(3, None)


def test_output_holds_them_by_prompt_with_their_text(toy, model):
    out = model.generate(PROMPTS, 6, logprobs=2)
    for prompt, tokens, lines in zip(PROMPTS, out.tokens, out.logprobs, strict=True):
        for token, line, want in zip(tokens, lines, told(toy, prompt, tokens, 2), strict=True):
            assert list(line) == list(want) and isinstance(line[token], Logprob)
            assert line[token].decoded_token == model.tokenizer.decode([token])
    alone = model.generate(PROMPTS[0], 6, logprobs=0, temperature=1.0, seed=3)
    assert [list(line) for line in alone.logprobs[0]] == [[token] for token in alone.tokens[0]]
    assert model.generate(PROMPTS[0], 2).logprobs is None


def alone(toy, prompt, limit, rng, options):
    """The tokens by the oracle, drawn with one generator."""
    sampler, ids = Standard(**options), list(prompt)
    for _ in range(limit):
        ids.append(sampler(toy.oracle(np.array(ids))[-1], np.array(ids), rng))
        if ids[-1] == 0:
            break
    return ids[len(prompt) :]


def test_samples_of_a_prompt_are_independent_and_the_first_is_that_of_one(toy, model):
    """Flat, prompt by prompt; n = 4 is above max_batch = 3."""
    options = {"temperature": 1.2, "top_k": 50}
    for n in (2, 4):
        out = model.generate(PROMPTS, 7, seed=5, n=n, **options)
        want = []
        for prompt in PROMPTS:
            rng = np.random.default_rng(5)
            want += [alone(toy, prompt, 7, r, options) for r in [rng, *rng.spawn(n - 1)]]
        assert out.tokens == want and len(out.text) == len(out.finish_reason) == 3 * n
        assert out.tokens[::n] == model.generate(PROMPTS, 7, seed=5, **options).tokens
        assert len(set(map(tuple, out.tokens[:n]))) == n
        assert out.stats["prompt_tokens"] == sum(map(len, PROMPTS))
    unseeded = model.generate(PROMPTS[0], 7, n=3, temperature=1.5)
    assert len(set(map(tuple, unseeded.tokens))) > 1


def test_a_prompt_of_several_samples_runs_once(model):
    """Calls and tokens of the session that the loop is given."""
    seen, tokens = [], model._loop.tokens

    class Watched(type(model._loop)):
        def tokens(self, session, rows, context):
            yield from tokens(session, rows, context)
            seen.append((session.stats["tokens"], session.stats["calls"], session.batch))

    prompt, n, limit = list(range(40, 90)), 3, 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_loop", Watched())
        model.generate([prompt, prompt[:7]], limit, n=n, temperature=1.0, seed=1, eos=[])
    assert seen == [(size + n * (limit - 1), limit, n) for size in (50, 7)]


def test_copies_in_the_wrong_order_are_caught(toy, model, monkeypatch):
    monkeypatch.setattr(
        prompts_module.np,
        "searchsorted",
        lambda first, which: np.zeros(len(which), np.int64),
        raising=False,
    )
    with load(toy.path, threads=1) as other:
        monkeypatch.setattr(other.facts, "max_batch", 6)
        prompts = PROMPTS[:2]
        got = other.generate(prompts, 7, seed=5, n=2, temperature=1.2).tokens
        monkeypatch.undo()
        assert got != model.generate(prompts, 7, seed=5, n=2, temperature=1.2).tokens


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["kv-int8", "snapkv", "quest", "paged-prefix", "gemfilter", "promptdistill"]
)
def test_samples_share_a_prefill_under_every_cache(name):
    """The first of each prompt is what it gets alone, whatever became of its prompt in the cache."""
    model = built("llama", tables=CASES[name])
    prompts = texts(50, 2, 0, 30)
    out = model.generate(prompts, 12, n=3, temperature=0.9, seed=4, eos=[])
    assert out.tokens[::3] == model.generate(prompts, 12, temperature=0.9, seed=4, eos=[]).tokens
    assert out.stats["prompt_tokens"] == sum(map(len, prompts))


def test_searches_and_drafts_take_several_samples(toy):
    for loop in ("first-finish", "prompt-lookup"):
        rng = np.random.default_rng(3)
        shared = np.array(PROMPTS[2], np.int64)
        ends = {"limit": 20, "max_context": 1000}
        rows = [Row(shared, WARM, r, **ends) for r in rng.spawn(3)]
        apart = [Row(shared.copy(), WARM, r, **ends) for r in np.random.default_rng(3).spawn(3)]
        for each in (rows, apart):
            with toy.session(batch=3) as session:
                drafts = loop == "prompt-lookup"
                run = (
                    speculated(session, each, PromptLookup(), "sample-match")
                    if drafts
                    else LOOPS[loop](toy, session, each)
                )
                list(run)
        assert [row.tokens for row in rows] == [row.tokens for row in apart]


def test_finish_and_stop_reason(model):
    free = model.generate([4, 5], 12, eos=[])
    assert free.finish_reason == ["length"] and free.stop_reason == [None]
    end, word = free.tokens[0][3], free.text[0][4:7]
    asked = model.generate([4, 5], 12, eos=[end])
    assert asked.finish_reason == ["stop"] and asked.stop_reason == [end]
    own = SamplingParams(max_tokens=12, stop_token_ids=[end])
    model.facts.eos, before = (end,), model.facts.eos
    try:
        mine = model.generate([4, 5], sampling_params=own)
        assert mine.stop_reason == [None], "the model's own, as in vLLM"
    finally:
        model.facts.eos = before
    stopped = model.generate([4, 5], 12, eos=[], stop=["never", word])
    assert stopped.finish_reason == ["stop"] and stopped.stop_reason == [word]
    text = free.text[0]
    stops = [f"{text[-3:]}never", text[-2:]]  # where the text ends, the first one may still come
    waited = model.generate([4, 5], 12, eos=[], stop=stops)
    assert waited.text == [text[:-2]] and waited.tokens == free.tokens
    assert waited.finish_reason == ["stop"] and waited.stop_reason == [text[-2:]]
    full = model.generate(np.arange(1300) % 7, 5)
    assert full.finish_reason == ["length"] and full.stats["finish"] == ["context"]


def test_a_stream_tells_the_same(model):
    want = model.generate([4, 5], 8, logprobs=1, eos=[])
    with model.stream([4, 5], 8, logprobs=1, eos=[]) as stream:
        next(stream)
        assert stream.finish_reason is None and len(stream.logprobs) == 1
        list(stream)
    assert stream.logprobs == want.logprobs[0]
    assert (stream.finish_reason, stream.stop_reason) == ("length", None)
    with pytest.raises(InputError, match="one sample, not n = 2"):
        model.stream([4], sampling_params=SamplingParams(n=2, temperature=1.0))


@pytest.mark.parametrize("count", [0, 1, 5, 400])
def test_equal_logits_rank_alike(count):
    logits = np.array([1.0, 3.0, 3.0, -np.inf, 2.0], np.float32)
    found = TopLogprobs(count)(2, logits)
    assert list(found) == [2, *[t for t in (1, 2, 4, 0, 3)[:count] if t != 2]]
    assert found[2].rank == 1 and sum(math.exp(one.logprob) for one in found.values()) <= 1 + 1e-6
