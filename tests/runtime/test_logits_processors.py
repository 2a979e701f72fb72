"""logit_bias, logits_processors and grammars: the same tokens with and without drafts, the law of sampled ones, order,
and mistakes of the user's functions.
"""

import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from accel.ir.errors import AccelError, InputError
from accel.runtime.canvas.whole import Whole
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.logits_processors import Processed
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.decode.structured_outputs import Grammar, StructuredOutputsParams
from accel.runtime.draft.model import Model
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.draft.token_recycling import TokenRecycling
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop.beam_patience import BeamPatience
from accel.runtime.loop.dllm_lowconf import DllmLowconf
from accel.runtime.loop.first_finish import FirstFinish
from accel.runtime.loop.lookahead import Lookahead
from accel.runtime.model.load import load
from accel.runtime.sample.standard import Standard
from accel.runtime.tree.dyspec import Dyspec
from accel.runtime.tree.eagle_tree import EagleTree
from accel.runtime.tree.static import Static
from accel.runtime.verify import Target

from ..draft_case import Known, plain, rows_of, speculated, surprise
from ..prefill_case import built
from ..test_speculation import texts
from .loop.test_speculative import drawing
from .test_draft_model import Beside

PROMPTS = [[5, 17, 200, 3, 88], [9], [7, 8] * 12]
RECYCLING = {"draft": {"use": "token-recycling"}}
WARM = Standard(temperature=0.8, top_k=30)
PENALTIES = Standard(
    repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.4, start=len(PROMPTS[-1])
)
WORDS = StructuredOutputsParams(regex="([a-d]{1,3} )+[0-9]{2}")


def alternate(ids, logits):
    """Bans a third of the tokens, by the last one: it depends on the path."""
    logits[int(ids[-1]) % 3 :: 3] = -np.inf
    return logits


@pytest.fixture(scope="module")
def tokenizer(toy):
    return Tokenizer(toy.path / "tokenizer.json")


@pytest.fixture(scope="module")
def rows(toy, tokenizer):
    """rows(sampler, prompts=, grammar=, vocabulary=, **ends): rows with processors, a guide for each."""
    words = Grammar(WORDS, tokenizer, toy.vocab)

    def make(
        sampler=WARM,
        prompts=PROMPTS,
        grammar=False,
        processors=(alternate,),
        vocab=toy.vocab,
        **ends,
    ):
        ends = {"eos": (0,)} | ends
        made = rows_of(prompts, sampler, 3, **ends)
        for row in made:
            guide = words.begin(row.prompt.size, (0,)) if grammar else None
            row.sampler = Processed(sampler, vocab, {2: 1.5}, processors, guide)
        return made

    return make


def text(tokenizer, row):
    return tokenizer.decode(row.tokens)


@pytest.mark.parametrize("sampler", [Standard(), WARM, PENALTIES], ids=str)
@pytest.mark.parametrize("grammar", [False, True])
def test_drafts_change_no_token(toy, rows, tokenizer, sampler, grammar):
    make = partial(rows, sampler, grammar=grammar)
    without = plain(toy.session(batch=3), rows_of(PROMPTS, sampler, 3))
    want = make()
    found = dict(zip(map(tuple, PROMPTS), plain(toy.session(batch=3), want), strict=True))
    assert list(found.values()) != without, "they change what comes"
    stood = 0
    for drafter in (Known(found), Known(found, wrong=3), PromptLookup(ngram=1)):
        got = make()
        with toy.session(batch=3) as session:
            list(speculated(session, got, drafter, "sample-match"))
        assert [(r.tokens, r.finish) for r in got] == [(r.tokens, r.finish) for r in want]
        stood += sum(row.drafting["accepted"] for row in got)
    assert stood > 20
    for row in want if grammar else ():
        whole = re.fullmatch(WORDS.regex, text(tokenizer, row))
        assert bool(whole) == (row.finish == "stop") and row.finish in ("stop", "length")


RULES = ("sample-match", "spec-chain", "block-verify", "rrs-wor", "medusa-typical", "top-beta")


@pytest.mark.parametrize("sampler", [Standard(), Standard(temperature=0.01)], ids=str)
def test_drafts_may_go_on_behind_a_text_that_ends_without_an_end_token(toy, tokenizer, sampler):
    """The row ends where the grammar does, whatever was drafted and accepted behind it."""
    words = Grammar(StructuredOutputsParams(regex="[a-d]{6}"), tokenizer, toy.vocab)

    def make():
        made = rows_of(PROMPTS, sampler, 3)
        for row in made:
            row.sampler = Processed(sampler, toy.vocab, guide=words.begin(row.prompt.size, ()))
        return made

    want = make()
    plain(toy.session(batch=3), want)
    assert {row.finish for row in want} == {"stop"}
    behind = plain(toy.session(batch=3), rows_of([row.seen for row in want], limit=6))
    found = {tuple(r.prompt.tolist()): r.tokens + b for r, b in zip(want, behind, strict=True)}
    for rule in RULES:
        got = make()
        with toy.session(batch=3) as session:
            list(speculated(session, got, Known(found), rule))
        assert [(r.tokens, r.finish) for r in got] == [(r.tokens, r.finish) for r in want], rule
        assert sum(row.drafting["accepted"] for row in got) > 6


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampler", [Standard(), Standard(temperature=0.01)], ids=str)
def test_a_function_may_fail_behind_a_rows_end(toy, rule, sampler):
    """The draft goes on behind the end token, and the row does not."""
    (found,) = plain(toy.session(), rows_of(PROMPTS[:1], limit=12))
    last = next(n for n in range(3, 12) if found.index(found[n]) == n)

    def fails(ids, logits):
        return logits if ids.size <= len(PROMPTS[0]) + last else 1 / 0

    (row,) = rows_of(PROMPTS[:1], sampler, limit=12, eos=[found[last]])
    row.sampler = Processed(sampler, toy.vocab, processors=[fails])
    with toy.session() as session:
        list(speculated(session, [row], Known({tuple(PROMPTS[0]): found}), rule))
    assert (row.tokens, row.finish) == (found[: last + 1], "eos") and row.drafting["accepted"]


def held_to(prompts, want):
    """A function that lets nothing follow tokens that are not those of a row's text."""
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, want, strict=True)]

    def held(ids, logits):
        inside = any(text[: ids.size] == ids.tolist() for text in texts)
        return logits if inside else np.full_like(logits, -np.inf)

    return held


@pytest.mark.parametrize("sampler", [Standard(), WARM], ids=str)
def test_a_draft_ends_where_nothing_may_follow(toy, rows, sampler):
    """The draft model comes there, and the text never does."""
    want = plain(toy.session(batch=3), rows_of(PROMPTS, sampler, 3))
    held = held_to(PROMPTS, want)
    beside = Beside(toy, 1.0)
    got = rows_of(PROMPTS, sampler, 3)
    for row in got:
        row.sampler = Processed(sampler, toy.vocab, processors=[held])
    with toy.session(batch=3) as session:
        list(speculated(session, got, Model(), "sample-match", model=beside.target))
    assert [row.tokens for row in got] == want
    figures = [row.drafting for row in got]
    assert any(one["drafted"] > one["accepted"] > 0 for one in figures)


@pytest.mark.few(1)
def test_a_tree_ends_where_nothing_may_follow():
    model = built("llama", tables=RECYCLING)
    prompts = texts(50, 3, 1, 30)
    want = plain(model.session(3), rows_of(prompts, max_context=64))
    for shape in (EagleTree(depth=2), Dyspec(depth=2)):
        got = rows_of(prompts, max_context=64)
        held = held_to(prompts, want)
        for row in got:
            row.sampler = Processed(Standard(), model.facts.vocab_size, processors=[held])
        own = SimpleNamespace(draft_model=model, tokenizer=None, facts=model.facts)
        with model.session(3) as session:
            list(speculated(session, got, Model(), "sample-match", model=own, tree=shape))
        assert [row.tokens for row in got] == want
        assert all(row.drafting["drafted"] > row.drafting["accepted"] > 0 for row in got)


def test_a_verifier_that_forgets_the_path_is_caught(toy, rows, monkeypatch):
    """The control: the distribution of every node from the tokens before the draft."""
    want = plain(toy.session(batch=3), rows(Standard()))
    found = dict(zip(map(tuple, PROMPTS), want, strict=True))
    law = Target.law

    def forgets(self, node):
        self._ids[self._size :] = self._ids[self._size - 1]
        self._laws[node] = self._sampler.distribution(
            self._logits[node + 1], self._ids[: self._size]
        )
        return law(self, node)

    monkeypatch.setattr(Target, "law", forgets)
    got = rows(Standard())
    with toy.session(batch=3) as session, pytest.raises(AssertionError, match="than came"):
        list(speculated(session, got, Known(found), "sample-match"))


def milder(ids, logits):
    logits[int(ids[-1]) % 3 :: 3] -= 0.5
    return logits


@pytest.mark.few(1)
@pytest.mark.parametrize("loop", ["tree", "lookahead"])
def test_trees_change_no_token(rows, loop):
    tables = RECYCLING if loop == "tree" else {"loop": {"use": "lookahead"}}
    model, stood = built("llama", tables=tables), 0
    make = partial(
        rows, vocab=model.facts.vocab_size, max_context=64, eos=(), processors=(milder,), limit=24
    )
    for seed, sampler in enumerate((Standard(), WARM)):
        prompts = texts(50, 3, seed, 30)
        want = plain(model.session(3), make(sampler, prompts))
        assert want != plain(
            model.session(3), rows_of(prompts, sampler, 3, max_context=64, limit=24)
        )
        got = make(sampler, prompts)
        with model.session(3) as session:
            if loop == "tree":
                list(speculated(session, got, TokenRecycling(), "sample-match", 12, tree=Static()))
            else:
                list(Lookahead(2, 4, 3).tokens(session, got, DecodeContext()))
        assert [row.tokens for row in got] == want
        stood += sum(row.drafting["accepted"] for row in got)
    assert stood > 0


def lies(toy, rule, sampler, verifier=None):
    """See `surprise`; drafts are drawn from odds of their own."""

    def drafter(law):
        q = np.zeros(toy.vocab)
        possible = sorted({token for past in law for token in past})
        q[possible] = np.random.default_rng(1).exponential(size=len(possible))
        return drawing(np.random.default_rng(2), q / q.sum(), True)

    return surprise(toy, rule, drafter, 300, sampler, verifier)


@pytest.mark.long
def test_sampled_tokens_have_the_odds_of_the_processed_target(toy, tokenizer):
    warm = Standard(temperature=1.5, top_k=3)
    guide = Grammar(StructuredOutputsParams(regex="[a-h ]{20}"), tokenizer, toy.vocab).begin(3, ())
    guided = Processed(warm, toy.vocab, guide=guide)
    path = Processed(warm, toy.vocab, {7: 2.0}, [alternate])
    assert lies(toy, "spec-chain", path) < 4 and lies(toy, "block-verify", guided) < 4
    with pytest.raises(KeyError):  # the control, rows without processors: what cannot come does
        lies(toy, "spec-chain", path, warm)


@pytest.mark.parametrize("loop", [FirstFinish(3), BeamPatience(3)], ids=["samples", "beams"])
def test_searches_follow_a_grammar_in_every_branch(toy, rows, tokenizer, loop):
    made = rows(WARM if isinstance(loop, FirstFinish) else Standard(), grammar=True, processors=())
    with toy.session(batch=3) as session:
        list(loop.tokens(session, made, DecodeContext()))
    for row in made:
        whole = re.fullmatch(WORDS.regex, text(tokenizer, row))
        assert row.tokens and bool(whole) == (row.finish == "stop")
    assert any(row.finish == "stop" for row in made)


def test_the_order_is_bias_then_functions_then_the_sampler(toy, model):
    calls = []

    def sees(ids, logits):
        calls.append((ids.tolist(), logits.copy()))
        logits[9] = logits.max() + 8
        return logits

    def then(ids, logits):
        assert int(logits.argmax()) == 9
        return (logits + np.eye(toy.vocab, dtype=np.float32)[11] * 1e4).tolist()

    out = model.generate(
        [4, 5], 3, logit_bias={6: 2.5}, logits_processors=[sees, then], repetition_penalty=9.0
    )
    assert [ids for ids, _ in calls] == [[4, 5, *out.tokens[0][:n]] for n in range(3)]
    want = toy.oracle(np.array([4, 5]))[-1]
    want[6] += 2.5
    np.testing.assert_allclose(calls[0][1], want, atol=1e-4)
    assert out.tokens[0][0] == 11


def test_bias_steers_and_bans(model):
    free = model.generate([4, 5], 6, eos=[]).tokens[0]
    assert model.generate([4, 5], 6, eos=[], logit_bias={33: 1e4}).tokens[0] == [33] * 6
    banned = model.generate([4, 5], 6, eos=[], logit_bias=dict.fromkeys(free, float("-inf")))
    assert not set(banned.tokens[0]) & set(free)


def raises(ids, logits):
    raise KeyError("sorry")


def late(ids, logits):
    return logits if ids.size < 5 else logits[:3]


def writes(ids, logits):
    ids[0] = 3
    return logits


WRONG = {
    "raises": (raises, ["logits_processors[1] (raises)", "KeyError", "sorry"]),
    "shape": (late, ["(late)", "[3]", "[320]"]),
    "none": (lambda ids, logits: None, ["NoneType", "<lambda>"]),
    "NaN": (lambda ids, logits: logits * np.nan, ["NaN"]),
    "nothing": (lambda ids, logits: logits - np.inf, ["-inf for every token"]),
    "infinite": (lambda ids, logits: np.where(ids[-1], np.inf, logits), ["+inf"]),
    "ids": (writes, ["(writes)", "read-only"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_functions_are_named_and_leave_the_model_usable(model, name):
    wrong, words = WRONG[name]
    want = model.generate(PROMPTS, 5).tokens
    with pytest.raises(InputError) as error:
        model.generate(PROMPTS, 9, eos=[], logits_processors=[alternate, wrong])
    assert all(word in str(error.value) for word in words), error.value
    assert model.generate(PROMPTS, 5).tokens == want


def test_a_session_outlives_a_function_that_fails_in_a_round(toy, rows):
    """What stood before stays; the session goes on."""
    want = plain(toy.session(batch=3), rows(Standard()))
    found = dict(zip(map(tuple, PROMPTS), want, strict=True))
    fails = rows(
        Standard(), processors=(alternate, lambda ids, logits: logits if ids.size < 30 else 1 / 0)
    )
    with toy.session(batch=3) as session:
        with pytest.raises(InputError, match="ZeroDivisionError"):
            list(speculated(session, fails, Known(found), "sample-match"))
        assert [row.tokens for row in fails] == [
            w[: len(row.tokens)] for row, w in zip(fails, want, strict=True)
        ]
        assert [row.seen.size for row in fails if row.error] == [30], "tokens before the error fell"
        held = [row.seen[: session.lengths[i]] for i, row in enumerate(fails)]
        for got, ids in zip(session.run([[7]] * 3), held, strict=True):
            np.testing.assert_allclose(
                got[0], toy.oracle(np.array([*ids, 7]))[-1], atol=1e-3, rtol=1e-3
            )


REFUSED = [
    ({"logit_bias": {5000: 1}}, "logit_bias"), ({"logit_bias": {-1: 1}}, "logit_bias"), ({"logit_bias": [3]}, "dict"),
    ({"logit_bias": {1: float("nan")}}, "token 1"), ({"logit_bias": {1: float("inf")}}, "ban"),
    ({"logit_bias": {1: "x"}}, "'x'"), ({"logits_processors": alternate}, "list of functions"),
    ({"logits_processors": [3]}, "list of functions"),
    ({"structured_outputs": {"regex": "a"}}, "accel.StructuredOutputsParams"),
    ({"logprobs": -1}, "logprobs"), ({"n": 0}, "n = 0"), ({"n": 2}, "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_out_of_range_is_named(model, options, said):
    with pytest.raises(InputError, match=re.escape(said)):
        model.generate([4], **options)


def test_loops_that_fill_masks_refuse_what_goes_token_by_token(toy, monkeypatch):
    given = {
        "logits_processors": [alternate],
        "logit_bias": {1: 2.0},
        "logprobs": 0,
        "structured_outputs": WORDS,
    }
    with load(toy.path, threads=1) as model:
        monkeypatch.setattr(model, "_loop", DllmLowconf())
        monkeypatch.setattr(model, "_methods", {"canvas": Whole()})
        for name, value in given.items():
            with pytest.raises(InputError, match=f"^{name}: this model fills masks"):
                model.generate([4], **{name: value})
        with pytest.raises(
            InputError, match="masked-diffusion model"
        ):  # the loop's own refusal of a causal model
            model.generate([4])


def test_a_model_that_gives_no_numbers_is_not_blamed_on_the_functions(toy):
    sampler = Processed(Standard(), toy.vocab, processors=[alternate])
    with pytest.raises(AccelError, match="the model's logits"):
        sampler.distribution(np.full(toy.vocab, np.nan, np.float32), np.array([1]))


def test_without_options_rows_have_the_plain_sampler(model, monkeypatch):
    """Nothing is paid for where nothing is asked for."""
    monkeypatch.delattr("accel.runtime.model.requests.Processed")
    monkeypatch.delattr("accel.runtime.model.requests.Grammar")
    assert model.generate([4, 5], 3, logits_processors=[], logit_bias={}).tokens
    (sample,) = model._samples([4], SamplingParams())
    assert type(sample.row.sampler) is Standard
