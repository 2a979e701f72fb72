"""Samplers: the distribution that each one's test file writes down, draws that follow it, and exact speculation. The
file of a method is `tests/runtime/sample/test_METHOD.py`: it holds OPTIONS, and `probabilities(p, o)`, the published
form of what a method with the options `o` makes of probabilities p [V].
"""

import importlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import accel
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError, InputError
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.sample import Distribution
from accel.runtime.sample.standard import Standard
from accel.runtime.sample.typical import Typical
from accel.runtime.serve.engine import Engine, Request

from ..draft_case import plain, rows_of, speculated
from ..once import made_once
from ..verify_case import World, gap

AXES = find_axes()
AXIS = AXES["sample"]
NONE = np.zeros(0, np.int64)
REQUESTS = [
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=50, repetition_penalty=1.3),
    dict(temperature=1.5, top_p=0.9, min_p=0.01, frequency_penalty=0.5),
]
SIZE = 400


def own(name: str) -> ModuleType:
    """The test file of a method."""
    module = f"{__package__.rpartition('.')[0]}.runtime.sample.test_{name.replace('-', '_')}"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        found = None
    if not (hasattr(found, "OPTIONS") and hasattr(found, "probabilities")):
        pytest.fail(
            f"{module} lacks OPTIONS or probabilities(p, o): write what {name} is compared with"
        )
    return found


CASES = [(name, options) for name in AXIS.names() for options in own(name).OPTIONS]


class Breaks(Typical):
    """A sampler that drops a token, for controls."""

    def reshape(self, law, seen):
        found = super().reshape(law, seen)
        return Distribution(found.tokens[1:], found.weights[1:])


def law_distribution(sampler, probabilities, seed=0):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(SIZE) * 3).astype(np.float32)
    seen, before = rng.integers(0, SIZE, 50), logits.copy()
    for request in REQUESTS:
        asked = replace(sampler, **request)
        left = replace(Standard(), **request).distribution(logits, seen)
        law = asked.distribution(logits, seen)
        want = probabilities(left.dense(SIZE), asked)
        assert np.array_equal(logits, before), "logits are not the sampler's to change"
        assert law.random and (np.diff(law.tokens) > 0).all() and (law.weights >= 0).all()
        assert abs(law.probabilities.sum() - 1) < 1e-12
        got = law.dense(SIZE)
        assert np.array_equal(got > 0, want > 0)
        np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_the_distribution_is_the_published_one(name, options):
    for seed in range(2):
        law_distribution(AXIS.build(name, **options), own(name).probabilities, seed)


def test_the_law_of_distributions_catches_a_token_too_few():
    with pytest.raises(AssertionError):
        law_distribution(Breaks(), own("typical").probabilities)


def test_the_law_of_a_method_without_a_published_form_fails():
    with pytest.raises(pytest.fail.Exception, match="lacks OPTIONS or probabilities"):
        own("no-such-method")


# Draws


CHI = 27.9  # of 9 degrees of freedom, less than one in a thousand


def chi_square(sampler, count=6000):
    """How far draws are from the distribution; infinite where one comes that it does not have."""
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5, 1.9, -3.0, -0.5, 0.2, 1.2], np.float32)
    want = sampler.distribution(logits, NONE).dense(10) * count
    rng = np.random.default_rng(5)
    got = np.bincount([sampler(logits, NONE, rng) for _ in range(count)], minlength=10)
    if got[want == 0].any():
        return math.inf
    some = want > 0
    return float(((got - want)[some] ** 2 / want[some]).sum())


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_draws_follow_the_distribution(name, options):
    assert chi_square(AXIS.build(name, temperature=1.0, **options)) < CHI


def test_the_law_of_draws_catches_what_is_drawn_from_another_distribution():
    @dataclass(frozen=True)
    class Hotter(Typical):
        def __call__(self, logits, seen, rng):
            return super().__call__(logits * np.float32(0.8), seen, rng)

    @dataclass(frozen=True)
    class Uncut(Typical):
        def __call__(self, logits, seen, rng):
            return Standard(1.0)(logits, seen, rng)

    assert chi_square(Hotter(1.0)) > CHI and chi_square(Uncut(1.0, mass=0.5)) > CHI


class Counted:
    """A generator that knows how many numbers were taken."""

    def __init__(self, seed=0):
        self.rng, self.taken = np.random.default_rng(seed), 0

    def random(self):
        self.taken += 1
        return self.rng.random()


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_a_draw_takes_one_number_and_goes_by_the_sum_of_what_comes_before(name, options):
    sampler, rng = AXIS.build(name, temperature=1.0, **options), Counted()
    logits = (np.random.default_rng(1).standard_normal(50) * 2).astype(np.float32)
    law = sampler.distribution(logits, np.array([3]))
    mass = law.weights.astype(np.float64).cumsum()
    for u in np.random.default_rng(0).random(20):
        want = law.tokens[(mass <= u * mass[-1]).sum()]
        assert sampler(logits, np.array([3]), rng) == want
    assert rng.taken == 20


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_greedy_is_not_touched_and_a_temperature_near_0_is_greedy(name, options):
    rng = Counted()
    for seed in range(5):
        logits = np.random.default_rng(seed).standard_normal((3, 200)).astype(np.float32)
        best = logits.argmax(-1).tolist()
        cold = AXIS.build(name, **options)
        assert cold.greedy and cold.choices(logits).tolist() == best
        for row, token in zip(logits, best, strict=True):
            assert cold(row, NONE, rng) == token and rng.taken == 0
            near = replace(cold, temperature=1e-6).distribution(row, NONE)
            assert near.of(token) > 1 - 1e-6


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_logits_that_are_no_numbers_and_extremes_that_are(name, options):
    sampler, rng = AXIS.build(name, temperature=1.0, **options), np.random.default_rng(0)
    for logits in ([math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]):
        with pytest.raises(AccelError, match="not numbers"):
            sampler(np.array(logits, np.float32), NONE, rng)
    logits = np.array([-math.inf, 1e30, -1e30, 1e30], np.float32)
    for temperature in (1e-300, 1e-3, 1.0, 1e300):
        law = replace(sampler, temperature=temperature).distribution(logits, NONE)
        assert np.isfinite(law.probabilities).all() and law.of(0) == 0
        assert replace(sampler, temperature=temperature)(logits, NONE, rng) in (1, 2, 3)
    only = np.array([-math.inf, 2.0, -math.inf], np.float32)
    assert sampler(only, NONE, rng) == 1, "as a grammar leaves one token"


# Speculation


EXACT = [n for n in AXES["verify"].names() if AXES["verify"].method(n).grade != "approximate"]


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("name", AXIS.names())
def test_drafts_change_no_probability(rule, name):
    """Of three tokens, over all random choices of a rule that promises it."""
    options = own(name).OPTIONS[0]
    sampler, rule = AXIS.build(name, temperature=1.0, **options), AXES["verify"].build(rule)
    assert gap(rule, World(sampler, "other"), (-1, 0)) < 1e-9


def test_the_law_of_drafts_catches_a_rule_that_goes_by_another_distribution():
    """A rule that is asked of plain sampling, while requests draw from another law."""
    world = World(Typical(1.0, mass=0.3), "other")
    plainly = World(Standard(1.0), "other")
    plainly.law = lambda seen: Standard(1.0).distribution(plainly.logits(seen), NONE)
    first = {t: plainly.law(()).of(t) for t in range(3)}
    assert max(abs(first[t] - world.law(()).of(t)) for t in range(3)) > 0.05
    assert gap(AXES["verify"].build("top-beta"), world, (-1, 0)) > 1e-3, "a rule that promises less"


@pytest.mark.parametrize("name", AXIS.names())
def test_drafted_tokens_are_those_of_plain_decoding(toy, name):
    """Given the same random numbers, by the rule that promises it; rows of a batch have samplers of their own."""
    from accel.runtime.draft.prompt_lookup import PromptLookup

    prompts = [[5, 17, 200, 3, 88] * 3, [7, 8] * 12, [9, 4, 9, 4, 9]]
    samplers = [
        AXIS.build(name, temperature=0.4, **own(name).OPTIONS[0]),
        Typical(0.5, mass=0.5),
        Standard(0.3),
    ]

    def rows():
        made = rows_of(prompts, Standard())
        for row, sampler in zip(made, samplers, strict=True):
            row.sampler = sampler
        return made

    with toy.session(batch=3) as session:
        want = plain(session, rows())
    with toy.session(batch=3) as session:
        speculated(session, (made := rows()), PromptLookup(ngram=1), "sample-match")
    assert [row.tokens for row in made] == want
    assert sum(row.drafting["drafted"] for row in made)


# Requests


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


def test_every_method_has_a_recipe_or_is_the_default():
    used = {
        accel.Recipe.load(path).tables["sample"]["use"]
        for path in (Path(__file__).parents[2] / "recipes" / "sampling").glob("[!_]*.toml")
    }
    assert used | {"standard"} == set(AXIS.names())
