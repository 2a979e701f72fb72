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
from accel.runtime.model.output import Meter
from accel.runtime.speculation.heir import Heir

SIZES = {"max_context": 128, "max_batch": 3, "verify": False}
RULE = {"verify": {"use": "sample-match"}}
SMALL, WHOLE = (
    8,
    120,
)  # tokens of a drafting cache: a part of the prompts, and all that there will be
LENGTHS = (60, 33, 70)


def prompts(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 101, size).tolist() for size in LENGTHS]


@pytest.fixture(scope="module")
def module():
    return models.ARCHITECTURES["llama"]()


@pytest.fixture(scope="module")
def built(module, tmp_path_factory):
    """built(tokens) -> the model that drafts over so many, 0: none; all with batch-invariant logits."""
    made = {}

    def get(tokens):
        if tokens not in made:
            draft = {"draft": {"use": "magicdec", "tokens": tokens}} | RULE
            recipe = [draft, "batch-invariant"] if tokens else "batch-invariant"
            folder = tmp_path_factory.mktemp("magicdec") / "artifact"
            made[tokens] = accel.optimize(module, recipe, out=folder, **SIZES)
            for one in (made[tokens], made[tokens].draft_model):
                if one is not None:
                    one._costs = Costs((1, 32), (1.0, 1.0))
        return made[tokens]

    yield get
    for each in made.values():
        each.close()


@pytest.fixture(autouse=True)
def no_guard(monkeypatch):
    """Everything is drafted, whatever it costs here, and nothing looked back at."""
    monkeypatch.setattr("accel.runtime.speculation.guard.Guard.limit", 5)
    monkeypatch.setattr("accel.runtime.speculation.guard.Guard.due", False)


def test_every_draft_stands_where_the_budget_holds_the_context(built):
    """The control, a cache of less, of which the target's tokens and the bits of their logits are the same, too. Up to
    the end of the context.
    """
    want = built(0).generate(prompts(), 90, eos=[], logprobs=3)
    assert want.stats["finish"] == ["context", "length", "context"]
    stood = {}
    for tokens in (WHOLE, SMALL):
        got = built(tokens).generate(prompts(), 90, eos=[], logprobs=3)
        assert got.tokens == want.tokens and got.logprobs == want.logprobs, "bit for bit"
        figures = got.stats["speculation"]
        stood[tokens] = figures["accepted"] / figures["drafted"]
        assert figures["drafted"] > 20
    assert stood[WHOLE] == 1 and stood[SMALL] < 0.5, stood
    sampled = {"temperature": 0.8, "seed": 3, "eos": []}
    got, want = (built(tokens).generate(prompts(), 20, **sampled) for tokens in (SMALL, 0))
    assert got.tokens == want.tokens and got.stats["speculation"]["accepted"] > 0


def test_rows_are_as_alone(built):
    """Prompts of other rows, and rows that ended, change no draft of a row."""
    together = built(SMALL).generate(prompts(), 30, eos=[])
    alone = [built(SMALL).generate(prompt, 30, eos=[]) for prompt in prompts()]
    assert together.tokens == [one.tokens[0] for one in alone]
    figures = [one.stats["speculation"] for one in (together, *alone)]
    for name in ("drafted", "accepted"):
        assert figures[0][name] == sum(one[name] for one in figures[1:])


def test_both_caches_are_counted(built, monkeypatch):
    """By hand: a step's cache of each, and what was kept; the control, a meter that sees the target's alone."""
    plain, drafts = built(0), built(SMALL)
    facts = plain.facts
    each = 4 * 3 * sum(2 * one.num_kv_heads * one.head_dim for one in facts.layers)  # of a slot
    target = plain.generate(prompts(), 20, eos=[]).stats["kv_bytes"]
    assert target == 256 * (each + 8 * 3), "slots come by 256, with a position each"
    got = drafts.generate(prompts(), 20, eos=[]).stats["kv_bytes"]
    heads = sum(one.num_kv_heads for one in facts.layers)
    assert got == 2 * target + SMALL * (each + 8 * 3 * heads)
    watch = Meter.watch

    def blind(self, tokens, session, rows):
        for pair in watch(self, tokens, session, rows):
            rows[0].beside = 0
            yield pair

    monkeypatch.setattr(Meter, "watch", blind)
    assert drafts.generate(prompts(), 20, eos=[]).stats["kv_bytes"] < got


def test_weights_are_stored_once(built, tmp_path):
    """One file, which both manifests name; what is damaged is found, and a copy works at another place."""
    plain, drafts = (built(tokens).artifact for tokens in (0, SMALL))
    own = built(SMALL).draft_model.artifact
    assert own.path == drafts.path and own.files["weights.bin"] == drafts.files["weights.bin"]
    assert drafts.files["weights.bin"] == plain.files["weights.bin"]
    assert drafts.files["step.native.onnx"].bytes == plain.files["step.native.onnx"].bytes
    assert own.recipe["tables"]["kv.score"] == {"use": "snapkv"} and own.facts.kv.observe == 32
    built(SMALL).save(tmp_path / "copy")
    with accel.load(tmp_path / "copy") as model:
        model._costs = Costs((1, 32), (1.0, 1.0))
        got = model.generate(prompts(), 9, eos=[])
        assert got.tokens == built(0).generate(prompts(), 9, eos=[]).tokens
        assert got.stats["speculation"]["drafted"] > 0
    file = tmp_path / "copy" / "draft.json"
    told = json.loads(file.read_text())
    told["model"]["max_context"] = 4
    file.write_text(json.dumps(told))
    with pytest.raises(ArtifactError, match="draft.json"):
        accel.load(tmp_path / "copy")


def test_the_prompt_is_run_once(built, monkeypatch):
    """A drafting session takes keys and values over; its first logits are those of one that reads all, to rounding. The
    control, keys of another position.
    """
    model, ran = built(SMALL), []
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


def test_a_recipe_by_name_drafts_too(module):
    """path = "self" of any recipe whose sessions take tokens back: the layers that are left, over the same weights."""
    recipe = {"draft": {"use": "model", "path": "self", "recipe": "kv-int8"}} | RULE
    with accel.optimize(module, [recipe, "int8"], **SIZES) as model:
        for one in (model, model.draft_model):
            one._costs = Costs((1, 32), (1.0, 1.0))
        tables = model.draft_model.recipe["tables"]
        assert tables["kv.codec"]["use"] == "kv-int8" and tables["weights"] == {"use": "int8"}
        got = model.generate(prompts()[:1], 20, eos=[])
        figures = got.stats["speculation"]
        assert figures["accepted"] > 0.5 * figures["drafted"] > 0
        names = {f.name for f in model.artifact.path.glob("*.bin")}
        assert names == {"weights.bin"}


def draft(**options):
    return {"draft": {"use": "model", "path": "self", **options}}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"draft": {"use": "magicdec", "score": "streaming-llm"}},
         "magicdec drafts by recipe 'magicdec', and takes back what is rejected, but with kv.when = every"),
        ({"draft": {"use": "magicdec", "score": "snap-kv"}}, "snap-kv.*did you mean 'snapkv'"),
        ({"draft": {"use": "magicdec", "tokens": 0}}, "magicdec: tokens is 0; give at least 1"),
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


def test_an_artifact_without_its_draft_is_refused(built):
    model = built(SMALL)
    model.draft_model, kept = None, model.draft_model
    with pytest.raises(InputError, match="built without its drafting cache"):
        model.generate(prompts()[0], 9)
    model.draft_model = kept


def test_a_draft_costs_what_it_reads(built):
    facts = built(0).facts
    assert cost_of(facts, 100, 100, 1) == cost_of(facts, 50, 100, 4) == 1
    assert 0 < cost_of(facts, 1 << 20, 64, 1) < 0.01 < cost_of(facts, 4096, 64, 1) < 1
