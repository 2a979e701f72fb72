"""path = "self" and magicdec: one file of weights, two caches; tokens are those of plain decoding, whatever the small
cache lost, and every draft stands where it lost nothing.
"""

import json

import models
import numpy as np
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.compiler.draft_build import own_plan, share
from accel.ir.errors import ArtifactError, InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.costs import Costs
from accel.runtime.draft.magicdec import cost_of
from accel.runtime.speculation.follow import BACK
from accel.runtime.speculation.heir import Heir

from ...draft_case import rows_of

SIZES = {"max_context": 128, "max_batch": 3, "verify": False}
COSTS = Costs((1, 32), (1.0, 1.0))
RULE = {"verify": {"use": "sample-match"}}
BUDGET = 34  # tokens of the drafting cache
LONG, SHORT = (60, 43, 70), (20, 9, 33)  # prompts that it holds a part of, and all of


def prompts(lengths=LONG, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 101, size).tolist() for size in lengths]


@pytest.fixture(scope="module")
def module():
    return models.ARCHITECTURES["llama"]()


@pytest.fixture(scope="module")
def plain(module):
    """A call of several tokens has the bits of single ones."""
    with accel.optimize(module, "batch-invariant", **SIZES) as model:
        model._costs = COSTS
        yield model


@pytest.fixture(scope="module")
def drafts(module):
    """The same, with drafts."""
    draft = {"draft": {"use": "magicdec", "tokens": BUDGET}} | RULE
    with accel.optimize(module, [draft, "batch-invariant"], **SIZES) as model:
        model._costs = model.draft_model._costs = COSTS
        yield model


@pytest.fixture(autouse=True)
def no_guard(monkeypatch):
    """Everything is drafted, whatever it costs here, and nothing looked back at."""
    monkeypatch.setattr("accel.runtime.speculation.guard.Guard.limit", 5)
    monkeypatch.setattr("accel.runtime.speculation.guard.Guard.due", False)


@pytest.mark.long
def test_every_draft_stands_where_the_budget_holds_the_context(plain, drafts):
    """The control, prompts of which it holds a part: the tokens and the bits of their logits are the same, too.
    Up to the end of the context.
    """
    stood = {}
    for lengths in (SHORT, LONG):
        want = plain.generate(prompts(lengths), 85, eos=[], logprobs=3)
        got = drafts.generate(prompts(lengths), 85, eos=[], logprobs=3)
        assert got.tokens == want.tokens and got.logprobs == want.logprobs, "bit for bit"
        assert got.stats["finish"] == want.stats["finish"]
        figures = got.stats["speculation"]
        stood[lengths] = figures["accepted"] / figures["drafted"]
        assert figures["drafted"] > 20
    assert want.stats["finish"] == ["context", "length", "context"]
    assert stood[SHORT] == 1 and stood[LONG] < 0.8, stood
    sampled = {"temperature": 0.8, "seed": 3, "eos": []}
    got, want = (model.generate(prompts(), 20, **sampled) for model in (drafts, plain))
    assert got.tokens == want.tokens and got.stats["speculation"]["accepted"] > 0


def test_rows_are_as_alone(drafts):
    """Prompts of other rows, and rows that ended, change no draft of a row."""
    together = drafts.generate(prompts(), 30, eos=[])
    alone = [drafts.generate(prompt, 30, eos=[]) for prompt in prompts()]
    assert together.tokens == [one.tokens[0] for one in alone]
    figures = [one.stats["speculation"] for one in (together, *alone)]
    for name in ("drafted", "accepted"):
        assert figures[0][name] == sum(one[name] for one in figures[1:])


def test_both_caches_are_counted(plain, drafts, monkeypatch):
    """By hand: a step's cache of each, and what was kept; the control, a drafter that tells of none."""
    facts = plain.facts
    each = 4 * 3 * sum(2 * one.num_kv_heads * one.head_dim for one in facts.layers)  # of a slot
    target = plain.generate(prompts(), 20, eos=[]).stats["kv_bytes"]
    assert target == 256 * (each + 8 * 3), "slots come by 256, with a position each"
    heads = sum(one.num_kv_heads for one in facts.layers)
    want = 2 * target + BUDGET * (each + 8 * 3 * heads)
    assert drafts.generate(prompts(), 20, eos=[]).stats["kv_bytes"] == want
    monkeypatch.setattr("accel.runtime.draft._beside.Beside.kv_bytes", 0)
    assert drafts.generate(prompts(), 20, eos=[]).stats["kv_bytes"] != want


def test_weights_are_stored_once(plain, drafts, tmp_path):
    """One file, which both manifests name; what is damaged is found, and a copy works at another place."""
    both, own, alone = (m.artifact for m in (drafts, drafts.draft_model, plain))
    assert own.path == both.path and own.files["weights.bin"] == both.files["weights.bin"]
    assert both.files["weights.bin"] == alone.files["weights.bin"], "nothing is stored twice"
    assert own.recipe["tables"]["kv.score"] == {"use": "snapkv"} and own.facts.kv.observe == 32
    drafts.save(tmp_path / "copy")
    with accel.load(tmp_path / "copy") as model:
        model._costs = model.draft_model._costs = COSTS
        got = model.generate(prompts(), 9, eos=[])
        assert got.tokens == plain.generate(prompts(), 9, eos=[]).tokens
        assert got.stats["speculation"]["drafted"] > 0
    file = tmp_path / "copy" / "draft.json"
    told = json.loads(file.read_text())
    told["model"]["max_context"] = 4
    file.write_text(json.dumps(told))
    with pytest.raises(ArtifactError, match="draft.json"):
        accel.load(tmp_path / "copy")


def test_the_prompt_is_run_once(drafts, monkeypatch):
    """A drafting session takes keys and values over; its first logits are those of one that reads all, to rounding. The
    control, keys of another position.
    """
    model, ran = drafts, []
    run = Heir.run

    def counted(self, rows, prompt=False, last_only=True):
        ran.append(max(ids.size for ids in rows.values()))
        return run(self, rows, prompt, last_only)

    monkeypatch.setattr(Heir, "run", counted)
    model.generate(prompts(), 4, eos=[])
    assert ran[0] == 32, "the last queries, of 70 tokens"
    ids = np.array(prompts()[2])
    with (
        model.session() as whole,
        model.draft_model.session() as all_,
        model.draft_model.session() as taken,
    ):
        whole.run([ids])
        want = all_.prompt([ids])
        assert taken.take(whole, np.array([38])) and taken.length == 38
        assert np.allclose(taken.prompt([ids[38:]]), want, atol=1e-4)
        with model.draft_model.session() as wrong:
            wrong.take(whole, np.array([37]))
            assert not np.allclose(wrong.prompt([ids[38:]]), want, atol=1e-2)
    with model.draft_model.session() as dropped, model.draft_model.session() as other:
        dropped.prompt([ids])
        assert not other.take(dropped, np.array([38])) and other.length == 0, "it dropped some"


def test_it_looks_back_at_what_it_would_have_drafted(plain, drafts):
    """Of tokens that came without drafts: all stand where the budget holds the context. The control, longer prompts."""
    for lengths, whole in (((9, 12, 15), True), (LONG, False)):
        given, new = prompts(lengths), 20
        came = plain.generate(given, new, eos=[]).tokens
        rows = rows_of(given, limit=60)
        tokens = np.zeros((3, max(lengths) + new - 1), np.int64)
        for i, row in enumerate(rows):
            for token in came[i]:
                row.accept(token, None)
            tokens[i, : row.seen.size - 1] = row.seen[:-1]
        with drafts.session(3) as session:
            session.run(tokens, np.array(lengths) + new - 1)
            drafters = drafts._methods["draft"].open(session, rows, drafts._context())
            found = drafters.probe([0, 1, 2])
            drafters.close()
        assert sum(stood for _, stood in found) == 3 * BACK if whole else len(found) > 3
        assert all(drafted == stood for drafted, stood in found) == whole


@pytest.mark.long
def test_a_recipe_by_name_drafts_too(module):
    """path = "self" with any recipe whose sessions take tokens back, over the same weights."""
    recipe = {"draft": {"use": "model", "path": "self", "recipe": "kv-int8"}} | RULE
    with accel.optimize(module, [recipe, "int8"], **SIZES) as model:
        for one in (model, model.draft_model):
            one._costs = COSTS
        tables = model.draft_model.recipe["tables"]
        assert tables["kv.codec"]["use"] == "kv-int8" and tables["weights"] == {"use": "int8"}
        got = model.generate(prompts()[:1], 20, eos=[])
        figures = got.stats["speculation"]
        assert figures["accepted"] > 0.5 * figures["drafted"] > 0
        names = {f.name for f in model.artifact.path.glob("*.bin")}
        assert names == {"weights.bin"}


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["kv-int8", "gemfilter", "int4-gptq"])
def test_it_drafts_for_other_recipes(module, recipe):
    """Where the caches differ, or the target read a part of the prompt, the draft reads all of it; rounding that goes
    by what a program computes is done once.
    """
    draft = {"draft": {"use": "magicdec", "tokens": BUDGET}} | RULE
    with (
        accel.optimize(module, recipe, target="eager", **SIZES) as plain,
        accel.optimize(module, [draft, recipe], target="eager", **SIZES) as model,
    ):
        model._costs = model.draft_model._costs = COSTS
        want = plain.generate(prompts(), 8, eos=[]).tokens
        got = model.generate(prompts(), 8, eos=[])
        assert got.tokens == want and got.stats["speculation"]["drafted"] > 0
        names = set(model.draft_model.program.params) & set(model.program.params)
        for name in names:
            assert model.draft_model.program.params.stored(name) is model.program.params.stored(
                name
            )
        assert names


def test_it_drafts_over_the_first_and_the_newest_tokens(module):
    """StreamingLLM's choice, made once; every draft stands where the budget holds the context."""
    table = {"use": "magicdec", "score": "streaming-llm", "tokens": BUDGET}
    with (
        accel.optimize(module, "base", target="eager", **SIZES) as plain,
        accel.optimize(module, {"draft": table} | RULE, target="eager", **SIZES) as model,
    ):
        model._costs = model.draft_model._costs = COSTS
        tables = model.draft_model.recipe["tables"]
        assert (tables["kv.score"]["use"], tables["kv.when"]["use"]) == ("streaming-llm", "prompt")
        stood = {}
        for lengths in (SHORT, LONG):
            want = plain.generate(prompts(lengths), 12, eos=[]).tokens
            got = model.generate(prompts(lengths), 12, eos=[])
            figures = got.stats["speculation"]
            assert got.tokens == want and figures["drafted"] > 0
            stood[lengths] = figures["accepted"] / figures["drafted"]
        assert stood[SHORT] == 1 > stood[LONG]


def draft(**options):
    return {"draft": {"use": "model", "path": "self", **options}}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"draft": {"use": "magicdec", "score": "snap-kv"}}, "snap-kv.*did you mean 'snapkv'"),
        ({"draft": {"use": "magicdec", "tokens": 0}}, "draft.magicdec: tokens is 0; give 1 to 16777216"),
        ({"draft": {"use": "magicdec"}, "tree": {"use": "static"}}, "magicdec cannot be combined with tree = static"),
        (draft(recipe="h2o"), "h2o', and takes back what is rejected, but with"),
        (draft(recipe="int4"), "draft = model drafts by the model's own weights, and recipe 'int4' sets others"),
        (draft(recipe="prompt-lookup"), "which sets draft; a model that drafts is run token by token"),
        (draft() | {"length": {"use": "fixed", "tokens": 40}}, "drafts 40 tokens, beyond max_context = 40; give fewer"),
        (draft(recipe="snapkw"), "snapkw.*did you mean 'snapkv'"),
        ({"draft": {"use": "model", "recipe": "snapkv"}}, 'recipe = \'snapkv\' is of path = "self"'),
    ],
)  # fmt: skip
def test_what_cannot_draft_is_refused_by_name(tables, words):
    with pytest.raises(RecipeError, match=words):
        own_plan(assemble(Recipe(tables=tables)), 40)


def test_other_weights_are_refused(module):
    """A recipe that changes a parameter under its own name; the control, one that leaves it."""
    with accel.optimize(module, "base", target="eager", **SIZES) as model:
        target = model.program
    other = target.copy()
    share(other, target, calibrated=False)
    name = next(iter(other.params))
    other.params[name] = target.params[name] * 2
    with pytest.raises(RecipeError, match="by the draft's recipe parameter .* is another one"):
        share(other, target, calibrated=False)


def test_an_artifact_without_its_draft_is_refused(drafts):
    model = drafts
    model.draft_model, kept = None, model.draft_model
    with pytest.raises(InputError, match="built without its drafting cache"):
        model.generate(prompts()[0], 9)
    model.draft_model = kept


def test_a_draft_costs_what_it_reads(plain):
    facts = plain.facts
    assert cost_of(facts, 100, 100, 1) == cost_of(facts, 50, 100, 4) == 1
    assert 0 < cost_of(facts, 1 << 20, 64, 1) < 0.01 < cost_of(facts, 4096, 64, 1) < 1
