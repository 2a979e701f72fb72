"""Recipes that draft: the same tokens as without, what they go with and what not, and transformers' own look-up."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe, bundled
from accel.runtime.backends import clock
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.draft.iad import Iad
from accel.runtime.draft.prompt_lookup import PromptLookup
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.speculation import guard

from .draft_case import against, plain, rows_of, speculated
from .kv_case import table
from .once import made_once
from .prefill_case import built

NAMES = ("iad", "prompt-lookup", "token-recycling")
CASES = {
    "base": {},
    "kv-int8": {"kv.codec": {"use": "kv-int8"}},
    "snapkv": {"kv.score": table("snapkv"), "kv.budget": table("uniform", tokens_kept=8)},
    "quest": {"kv.select": {"use": "quest", "tokens_read": 12, "page": 4, "dense_layers": 0}},
    "paged-prefix": {"kv.reuse": {"use": "paged-prefix", "block": 4, "blocks": 64}},
    "gemfilter": {"prefill.prune": {"use": "gemfilter", "tokens": 12}},
    "promptdistill": {"prefill.prune": {"use": "promptdistill", "tokens": 12}},
}


def texts(vocabulary, count=3, seed=0, longest=28):
    """Prompts of different lengths; all but every second one repeat themselves."""
    rng = np.random.default_rng(seed)
    found = [np.tile(rng.integers(3, vocabulary, 7), 4), rng.permutation(np.arange(3, vocabulary))]
    return [found[i % 2][: longest - 6 * i].tolist() for i in range(count)]


@pytest.fixture(scope="module")
def exactly():
    """exactly(*recipes) -> a tiny Llama under them and `batch-invariant`."""

    def get(*recipes):
        model = models.ARCHITECTURES["llama"]()
        return accel.optimize(model, [*recipes, "batch-invariant"], max_context=96, max_batch=3)

    with made_once(get) as found:
        yield found


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}], ids=["greedy", "sampled"]
)
def test_batch_invariant_tokens_are_those_without_a_draft(exactly, name, sampling):
    without, drafts, rounds = exactly(), exactly(name), 0
    vocabulary = without.facts.vocab_size
    for seed in range(4):
        prompts = texts(vocabulary, 3, seed)
        want = without.generate(prompts, 60, eos=[], **sampling)
        got = drafts.generate(prompts, 60, eos=[], **sampling)
        assert got.tokens == want.tokens
        assert got.stats["finish"] == want.stats["finish"] == ["length"] * 3
        assert [
            drafts.generate(p, 60, eos=[], **sampling).tokens[0] for p in prompts
        ] == want.tokens
        rounds += got.stats["speculation"]["rounds"]
        assert want.stats["speculation"] is None
    assert rounds > 0, "nothing was drafted"


def test_what_repeats_is_read_in_fewer_calls(exactly, request, monkeypatch):
    """Each token that stands is a call less. Beside so small a model's steps, what the host does is long: left out."""
    costs = exactly("prompt-lookup").costs
    assert costs.ratio(32) == pytest.approx(1), "measured by the clock of tests"
    request.getfixturevalue("real_time")
    monkeypatch.setattr(clock, "host_now", lambda: 0.0)
    monkeypatch.setattr(guard, "HOST", 0.0)
    monkeypatch.setattr(guard, "BESIDE", 0.0)
    fewest = 1.0
    for prompt in texts(exactly().facts.vocab_size, 3):
        out = exactly("prompt-lookup").generate(prompt, 60, eos=[])
        figures = out.stats["speculation"]
        assert out.stats["calls"] <= 61 and figures["accepted"] <= figures["drafted"]
        assert out.stats["calls"] + figures["accepted"] == 60
        fewest = min(fewest, out.stats["calls"] / 60)
        (tested, stood), *_ = places = figures["by_place"] or [[0, 0]]
        assert tested == figures["rounds"] and sum(s for _, s in places) == figures["accepted"]
        assert all(t <= s for (t, _), (_, s) in zip(places[1:], places, strict=False)), (
            "those before stood"
        )
        assert stood <= tested and set(figures["seconds"]) == {"draft", "verify", "host"}
        assert (
            0
            < sum(figures["seconds"].values())
            < out.stats["decode_seconds"] + out.stats["prefill_seconds"]
        )
    assert fewest < 1


def test_streams_too(exactly):
    prompt = texts(exactly().facts.vocab_size, 1)[0]
    want = exactly().generate(prompt, 40, eos=[]).tokens[0]
    with exactly("prompt-lookup").stream(prompt, 40, eos=[]) as stream:
        assert list(stream) == want
        assert stream.stats["speculation"]["rounds"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_it_goes_with_what_keeps_calls_alike(name):
    """On the eager target, to rounding: greedy tokens of tiny models, none of them near a tie."""
    model = built("llama", tables=CASES[name])
    accepted = 0
    for seed in range(3):
        prompts = texts(50, 3, seed, 30)
        want = plain(model.session(3), rows_of(prompts, max_context=64))
        for drafter in (PromptLookup(), Iad()):
            with model.session(3) as session:
                rows = rows_of(prompts, max_context=64)
                list(speculated(session, rows, drafter))
            assert [row.tokens for row in rows] == want
            accepted += sum(row.drafting["accepted"] for row in rows)
    assert accepted > 0


def test_a_state_that_only_goes_forward_runs_again(stateful):
    program = stateful("mamba")
    model = CompiledModel(EagerBackend(program), program.facts)
    prompts = texts(program.facts.vocab_size, 1)
    want = plain(model.session(), rows_of(prompts))
    with model.session() as session:
        rows = rows_of(prompts)
        list(speculated(session, rows, PromptLookup()))
        assert [row.tokens for row in rows] == want and rows[0].drafting["rounds"] > 0


REFUSED = {
    "h2o": "kv.score = h2o",
    "trim-kv": "kv.when = every",
    "streaming-llm": "kv.when = every",
    "mikv": "kv.score = h2o",
    "calm": "depth = calm",
    "unified-skip": "depth = unified-skip",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_take_a_draft_back_is_refused_before_any_work(name):
    with pytest.raises(
        RecipeError,
        match=f"loop = speculative cannot be combined with {REFUSED[name]}: .*leave one of the two",
    ):
        accel.optimize("/no/such/model", ["prompt-lookup", name])


def test_what_assembles_is_what_sessions_can_do():
    """Every other recipe goes with a draft (or clashes in an axis)."""
    refused, declared = set(), set()
    for name in bundled():
        recipe = Recipe.load(name)
        if not {"loop", "draft"} & recipe.tables.keys() and against(recipe, "speculative"):
            declared.add(name)
        try:
            assemble(Recipe.load([name, "prompt-lookup"]))
        except RecipeError as error:
            refused |= {name} if "loop = speculative" in str(error) else set()
    assert refused == declared and refused > {*REFUSED, "edge"}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"loop": {"use": "speculative"}},
            "loop = speculative needs .draft.; add it with one of .*iad, .*prompt-lookup",
        ),
        (
            {"draft": {"use": "iad"}, "loop": {"use": "autoregressive"}},
            "loop = autoregressive drafts no tokens",
        ),
        (
            {"draft": {"use": "iad"}, "tree": {"use": "chain"}},
            "draft = iad sets its own draft shape",
        ),
        (
            {
                "loop": {"use": "pearl"},
                "draft": {"use": "model"},
                "verify": {"use": "sample-match"},
            },
            "loop = pearl has its own rule; leave .verify. out",
        ),
        (
            {"tree": {"use": "chain"}},
            "tree sets the shape of drafts, but the recipe has no .draft.",
        ),
        (
            {"length": {"use": "fixed"}},
            "length sets how many tokens are drafted, but the recipe has no .draft.",
        ),
        ({"draft": {"use": "promptlookup"}}, "did you mean 'prompt-lookup'"),
        ({"draft": {"use": "iad", "ngram": 0}}, "draft.iad: ngram is 0"),
        ({"draft": {"use": "prompt-lookup", "ngram": 0}}, "draft.prompt-lookup: ngram is 0"),
        (
            {"draft": {"use": "iad"}, "length": {"use": "fixed", "tokens": 0}},
            "length.fixed: tokens is 0",
        ),
    ],
)
def test_recipes_that_mean_nothing_are_refused(tables, words):
    with pytest.raises(RecipeError, match=words):
        assemble(Recipe(tables=tables))


def test_what_a_recipe_leaves_out_is_said():
    plan = assemble(Recipe(tables={"draft": {"use": "iad"}}))
    assert {axis: table["use"] for axis, table in plan.recipe.tables.items()} == {
        "draft": "iad", "loop": "speculative", "verify": "spec-chain", "length": "fixed",
    }  # fmt: skip
    assert plan.grade == "distribution-exact"
    assert assemble(Recipe.load("prompt-lookup")).grade == "lossless"


@pytest.mark.long
def test_an_artifact_drafts_by_itself(exactly, tmp_path):
    exactly("prompt-lookup").save(tmp_path / "artifact")
    prompt = texts(exactly().facts.vocab_size, 1)
    with accel.load(tmp_path / "artifact") as model:
        out = model.generate(prompt, 20, eos=[])
    assert out.tokens == exactly().generate(prompt, 20, eos=[]).tokens
    assert out.stats["speculation"]["rounds"] > 0 and out.stats["costs"] is not None


def theirs(seen, ngram, tokens, longest):
    """The draft of transformers."""
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    ids = torch.tensor([seen])
    lookup = PromptLookupCandidateGenerator(torch.tensor([99]), tokens, ngram, longest)
    return lookup.get_candidates(ids, is_first_iteration=False)[0][0, len(seen) :].tolist()


def test_the_look_up_is_that_of_transformers():
    rng, found = np.random.default_rng(0), 0
    for _ in range(600):
        size, ngram, tokens = (int(rng.integers(*span)) for span in ((1, 30), (1, 5), (1, 12)))
        seen = rng.integers(0, rng.integers(1, 9), size).tolist()
        got = PromptLookup(ngram).draft(np.array(seen), tokens).tokens.tolist()
        assert got == theirs(seen, ngram, tokens, 100), (seen, ngram, tokens)
        found += bool(got)
    assert found > 300


def test_tokens_are_those_of_transformers_with_look_up(exactly):
    """The whole way, against `generate(prompt_lookup_num_tokens=…)`."""
    model = models.ARCHITECTURES["llama"]()
    for prompt in texts(exactly().facts.vocab_size, 3, 2):
        want = model.generate(
            torch.tensor([prompt]),
            prompt_lookup_num_tokens=10,
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=10**6,
        )
        assert (
            exactly("prompt-lookup").generate(prompt, 40, eos=[]).tokens[0]
            == want[0, len(prompt) :].tolist()
        )


@pytest.mark.parametrize(
    ("tail", "draft"),
    [
        ([8], []),  # not in the input
        ([1], [2, 3, 2]),  # once: what follows it
        ([2], []),  # twice, and so is no longer tail than the input allows
        ([1, 2], [3, 2, 4]),  # the newest two tell
        ([3, 2], [4, 5]),
        ([9, 2], []),  # the newest two are not in it
    ],
)
def test_an_edit_is_aligned_by_what_occurs_once(tail, draft):
    """Input 1 2 3 2 4 5; an output that begins with `tail`, after a token that the input has not."""
    source = np.array([1, 2, 3, 2, 4, 5])
    drafter = Iad().begin(source)
    assert drafter.draft(np.array([*source, 7, *tail]), 3).tokens.tolist() == draft


def test_an_edit_of_nothing_takes_a_call_for_each_draft():
    """The output is the input: all of it stands, in a number of calls that the length says."""
    source = np.arange(40)
    seen, calls = source.tolist() + [77, 0], 0
    while seen[-1] != 39:
        seen += Iad().begin(source).draft(np.array(seen), 10).tokens.tolist()
        calls += 1
    assert seen == [*range(40), 77, *range(40)] and calls == 4
