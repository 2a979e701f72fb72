"""Samplers of requests and of recipes: the same alone and in a batch, beside drafts and with every other option."""

import math

import pytest

import accel
from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.logits_processors import Processed
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.decode.structured_outputs import Grammar, StructuredOutputsParams
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.sample import Distribution
from accel.runtime.sample.standard import Standard
from accel.runtime.sample.typical import Typical
from accel.runtime.serve.engine import Engine, Request

from ..diffusion_case import Filler, prompts
from ..draft_case import plain, rows_of, speculated
from ..once import made_once
from ..sample_case import AXIS, own


@pytest.fixture(scope="module")
def tokenizer(toy):
    return Tokenizer(toy.path / "tokenizer.json")


DRAFTED = [[5, 17, 200, 3, 88] * 3, [7, 8] * 12, [9, 4, 9, 4, 9]]


@pytest.mark.parametrize("name", AXIS.names())
def test_drafted_tokens_are_those_of_plain_decoding(toy, name):
    """Given the same random numbers, by the rule that promises it; rows of a batch have samplers of their own."""
    samplers = [
        AXIS.build(name, temperature=0.4, **own(name).OPTIONS[0]),
        Typical(0.5, mass=0.5),
        Standard(0.3),
    ]

    def rows():
        made = rows_of(DRAFTED, Standard())
        for row, sampler in zip(made, samplers, strict=True):
            row.sampler = sampler
        return made

    with toy.session(batch=3) as session:
        want = plain(session, rows())
    with toy.session(batch=3) as session:
        list(speculated(session, (made := rows()), PromptLookup(ngram=1), "sample-match"))
    assert [row.tokens for row in made] == want
    assert sum(row.drafting["drafted"] for row in made)


PROMPTS = [[5, 17, 200, 3, 88], [9], [7, 8] * 12]
WARM = {"temperature": 1.2, "eos": [], "max_new_tokens": 12}


@pytest.fixture(scope="module")
def opened(toy, tmp_path_factory):
    """opened(sampler) -> the toy, built with this sampler (a table), or with none."""

    def get(*table):
        folder = tmp_path_factory.mktemp("sample") / "artifact"
        tables = {"sample": dict(table)} if table else {}
        return accel.load(toy.write(folder, tables, max_batch=4, max_context=200))

    with made_once(get) as found:
        yield found


def table(name):
    """A request's sampler that changes the tokens of the toy, where any options do."""
    return {"use": name, **own(name).OPTIONS[0]}


@pytest.mark.parametrize("name", AXIS.names())
def test_same_seed_same_tokens_alone_and_in_a_batch(opened, name):
    model, asked = opened(), {**WARM, "sampler": table(name), "seed": 3}
    together = model.generate(PROMPTS, **asked).tokens
    assert together == model.generate(PROMPTS, **asked).tokens
    assert together == [model.generate(one, **asked).tokens[0] for one in PROMPTS]
    assert together == [list(model.stream(one, **asked)) for one in PROMPTS]
    plainly = model.generate(PROMPTS, **WARM, seed=3).tokens
    assert (together == plainly) is (name == "standard")
    cold = {**asked, "temperature": 0.0}
    greedy = model.generate(PROMPTS, **{**WARM, "temperature": 0.0}).tokens
    assert model.generate(PROMPTS, **cold).tokens == greedy


def test_the_law_of_batches_catches_a_sampler_that_counts_its_calls(opened, monkeypatch):
    calls = []

    def reshape(self, law, seen):
        calls.append(1)
        keep = slice(0, None if len(calls) % 2 else 3)
        return Distribution(law.tokens[keep], law.weights[keep])

    monkeypatch.setattr(Typical, "reshape", reshape)
    with pytest.raises(AssertionError):
        test_same_seed_same_tokens_alone_and_in_a_batch(opened, "typical")


def test_a_recipe_sets_the_sampler_of_requests_that_name_none(opened):
    sharp = {"use": "typical", "mass": 0.3}
    model, bare = opened(*sharp.items()), opened()
    default = model.generate(PROMPTS, **WARM, seed=1).tokens
    assert default == bare.generate(PROMPTS, **WARM, seed=1, sampler=sharp).tokens
    other = {"use": "bregman-topk"}
    asked = {**WARM, "seed": 1, "sampler": other}
    assert model.generate(PROMPTS, **asked).tokens == bare.generate(PROMPTS, **asked).tokens
    asked["sampler"] = {"use": "standard"}
    plainly = bare.generate(PROMPTS, **WARM, seed=1).tokens
    assert model.generate(PROMPTS, **asked).tokens == plainly != default


def test_rows_of_an_engine_have_samplers_of_their_own(opened):
    model = opened()
    samplers = [None, *map(table, AXIS.names())]
    params = [
        SamplingParams(10, temperature=1.1, seed=i, sampler=s) for i, s in enumerate(samplers)
    ]
    with Engine(model) as engine:
        tickets = [engine.submit(Request(PROMPTS[0], one)) for one in params]
        got = [[event.token for event in ticket if event.token >= 0] for ticket in tickets]
    want = [model.generate(PROMPTS[0], sampling_params=one).tokens[0] for one in params]
    assert got == want and len({tuple(one) for one in want}) > 2


def test_other_options_of_a_request_work_with_a_sampler(opened):
    """A biased or a banned token, functions, log-probabilities, penalties, several samples."""
    model = opened()
    asked = {**WARM, "seed": 0, "sampler": {"use": "top-h"}}
    alone = model.generate(PROMPTS[0], **asked, logit_bias={77: 60.0}).tokens[0]
    assert set(alone) == {77}
    free = model.generate(PROMPTS[0], **asked, n=3, logprobs=1)
    assert len(free.tokens) == 3 and all(len(one) == 12 for one in free.logprobs)
    banned = dict.fromkeys({t for tokens in free.tokens for t in tokens}, -math.inf)
    for tokens in model.generate(PROMPTS[0], **asked, n=3, logit_bias=banned).tokens:
        assert not banned.keys() & set(tokens)

    def only(ids, logits):
        logits[:] = -math.inf
        logits[[int(ids[-1]) % 7, 9]] = 1.0
        return logits

    ruled = model.generate(PROMPTS[0], **asked, logits_processors=[only]).tokens[0]
    assert set(ruled) <= {*range(7), 9}
    assert model.generate(PROMPTS[0], **asked, frequency_penalty=2.0).tokens != free.tokens[:1]


def test_grammars_hold_and_drafts_change_no_token_with_a_sampler(toy, tokenizer):
    """Given the same random numbers; a rejected draft leaves the grammar where it was."""
    words = Grammar(StructuredOutputsParams(regex="[a-z]{3}( [a-z]{3})*"), tokenizer, toy.vocab)

    def rows():
        made = rows_of(DRAFTED, Standard())
        for row in made:
            sampler = Typical(1.2, mass=0.6)
            row.sampler = Processed(sampler, toy.vocab, guide=words.begin(row.prompt.size, (0,)))
        return made

    plainly, made = rows(), rows()
    with toy.session(batch=3) as session:
        list(Autoregressive().tokens(session, plainly, DecodeContext()))
    with toy.session(batch=3) as session:
        list(speculated(session, made, PromptLookup(ngram=1), "sample-match"))
    assert [row.tokens for row in made] == [row.tokens for row in plainly]
    assert all(
        set(tokenizer.decode(row.tokens)) <= set("abcdefghijklmnopqrstuvwxyz ") for row in made
    )


def test_a_search_that_does_not_sample_refuses_a_temperature_whatever_the_sampler(toy, tmp_path):
    tables = {"loop": {"use": "beam-patience", "beams": 2}}
    with accel.load(toy.write(tmp_path / "beams", tables, max_batch=2, max_context=64)) as model:
        asked = {"sampler": {"use": "typical"}, "eos": []}
        greedy = model.generate([5, 6], 6, eos=[]).tokens
        assert model.generate([5, 6], 6, **asked).tokens == greedy
        with pytest.raises(
            InputError, match="searches for the most likely text and does not sample"
        ):
            model.generate([5, 6], 6, temperature=1.0, **asked)


def test_slots_of_a_masked_diffusion_model_are_drawn_with_it():
    """One slot, one call: `bregman-topk` at a high price leaves the likeliest token, which plain sampling does not."""
    filler = Filler(False).eval()
    asked = {"temperature": 3.0, "eos": [], "sampler": {"use": "bregman-topk", "price": 1.0}}
    recipe = {"loop": {"use": "dllm-lowconf"}}
    with accel.optimize(filler, recipe, target="eager", max_context=64) as model:
        best = model.generate(prompts()[0], 1, eos=[]).tokens
        drawn = [model.generate(prompts()[0], 1, seed=s, **asked).tokens for s in range(6)]
        plain = [
            model.generate(prompts()[0], 1, seed=s, temperature=3.0, eos=[]).tokens
            for s in range(6)
        ]
        assert drawn == [best] * 6 != plain
    chosen = {**recipe, "sample": {"use": "bregman-topk", "price": 1.0}}
    with accel.optimize(filler, chosen, target="eager", max_context=64) as model:
        assert model.generate(prompts()[0], 1, seed=0, temperature=3.0, eos=[]).tokens == best


WRONG = [
    ("typical", "sampler = 'typical': give {\"use\": name"),
    ({"mass": 0.5}, 'give {"use": name'),
    ({"use": 3}, 'give {"use": name'),
    ({"use": "typcal"}, "sample method 'typcal' does not exist; did you mean 'typical'"),
    ({"use": "typical", "mas": 0.5}, "option 'mas' does not exist; did you mean 'mass'"),
    ({"use": "typical", "mass": 0.0}, "sample.typical: mass is 0.0; give more than 0"),
    ({"use": "typical", "mass": math.nan}, "mass is nan; give more than 0 and less than 1"),
    ({"use": "typical", "mass": "0.5"}, "mass = '0.5' is str, not float"),
    ({"use": "eta", "epsilon": 1.0}, "epsilon is 1.0; give more than 0 and less than 1"),
    ({"use": "epsilon", "epsilon": -1.0}, "epsilon is -1.0; give more than 0"),
    ({"use": "top-h", "share": 1.5}, "share is 1.5; give "),
    ({"use": "bregman-topk", "price": math.inf}, "price is inf; give 0 to 1"),
    ({"use": "typical", "temperature": 0.5}, "temperature comes with each request; leave it out"),
]


@pytest.mark.parametrize("sampler, words", WRONG, ids=lambda one: str(one)[:40])
def test_a_wrong_sampler_is_named(opened, sampler, words):
    for made in (
        lambda: SamplingParams(sampler=sampler),
        lambda: opened().generate([1], temperature=1.0, sampler=sampler),
    ):
        with pytest.raises(InputError) as error:
            made()
        assert words in str(error.value) and str(error.value).startswith("sampler")
