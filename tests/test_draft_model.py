"""draft = model and draft = layerskip in what a build makes: they ship in the artifact, go with other methods, and give
the tokens of plain decoding; what cannot draft is refused with both sides.
"""

import copy
import os

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import InputError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.costs import Costs
from accel.runtime.draft.layerskip import LayerSkip
from accel.runtime.length.fixed import Fixed
from accel.runtime.speculation.round_cost import unmeasured_cost

from .draft_case import rows_of

SIZES = {"max_context": 96, "max_batch": 3}


def texts(count=3, seed=0):
    """Prompts of different lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 101, size).tolist() for size in (9, 4, 20, 1, 13)[:count]]


def disturbed(model, scale):
    """The model with noise on its weights: it agrees at times."""
    other, rng = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += scale * weight.std() * torch.randn(weight.shape, generator=rng)
    return other


@pytest.fixture(scope="module")
def modules():
    target = models.ARCHITECTURES["llama"]()
    return target, disturbed(target, 0.15)


@pytest.fixture(scope="module")
def folder(modules, tmp_path_factory):
    """A Hugging Face directory of the draft model."""
    path = tmp_path_factory.mktemp("draft") / "small"
    modules[1].save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def small(folder):
    """The same as an artifact, built as a user likes."""
    path = folder.parent / "artifact"
    accel.optimize(folder, "int8", out=path, verify=False, **SIZES).close()
    return path


@pytest.fixture(scope="module")
def whole(folder):
    """The same in float32: it drafts what transformers' drafts."""
    path = folder.parent / "whole"
    accel.optimize(folder, "base", out=path, verify=False, **SIZES).close()
    return path


@pytest.fixture(scope="module")
def built(modules, small, whole):
    """built(*recipes) -> the target, `batch-invariant` too: a call of several tokens has the bits of single ones."""
    made, rule = {}, {"verify": {"use": "sample-match"}}
    drafts = {"model": {"draft": {"use": "model", "path": str(small)}} | rule}
    drafts["whole model"] = {"draft": {"use": "model", "path": str(whole)}} | rule
    drafts["layerskip"] = {"draft": {"use": "layerskip", "exit": 1}} | rule

    def get(*recipes):
        if recipes not in made:
            named = [drafts.get(recipe, recipe) for recipe in (*recipes, "batch-invariant")]
            made[recipes] = unmeasured(accel.optimize(modules[0], named, verify=False, **SIZES))
        return made[recipes]

    yield get
    for each in made.values():
        each.close()


def unmeasured(model):
    """Whose calls cost what it is told."""
    for one in (model, model.draft_model):
        if one is not None:
            one._costs = Costs((1, 32), (1.0, 1.0))
    return model


@pytest.fixture(autouse=True)
def no_guard(monkeypatch):
    """Everything is drafted, whatever it costs here."""
    monkeypatch.setattr("accel.runtime.speculation.guard.Guard.limit", 5)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [("model",), ("layerskip",), ("layerskip", "int4")], ids="+".join)
def test_tokens_are_those_of_plain_decoding(built, case):
    """Greedy and sampled, of rows that accept different numbers."""
    plain, drafts = built(*case[1:]), built(*case)
    stood = set()
    for seed in range(4):
        options = {"temperature": 0.7 * (seed % 2), "seed": seed, "eos": []}
        prompts = texts(3, seed)
        got = drafts.generate(prompts, 40, **options)
        assert got.tokens == plain.generate(prompts, 40, **options).tokens
        figures = got.stats["speculation"]
        stood.add(figures["accepted"] / figures["drafted"])
    assert 0 < min(stood) < max(stood) < 1


def test_an_artifact_holds_its_draft_model(built, tmp_path, monkeypatch):
    """Saved, moved, loaded from another place: one folder, and no path of the machine that built it."""
    made = built("model")
    assert made.recipe["tables"]["draft"] == {"use": "model", "path": "draft"}
    assert made.report["bytes"]["draft/weights.bin"] > 0
    made.save(tmp_path / "first")
    os.rename(tmp_path / "first", tmp_path / "second")
    monkeypatch.chdir(tmp_path)
    with accel.load("second") as model:
        assert model.draft_model.artifact.path == tmp_path / "second" / "draft"
        got = model.generate(texts(), 30, eos=[])
        assert got.tokens == built().generate(texts(), 30, eos=[]).tokens
        assert got.stats["speculation"]["accepted"] > 0
        stream = model.stream(texts()[0], 30, eos=[])
        first = [next(stream) for _ in range(3)]
        stream.close()
        assert model.generate(texts()[0], 30, eos=[]).tokens[0][:3] == first, (
            "what was interrupted leaves no trace"
        )
    with pytest.raises(InputError, match="closed"):
        model.draft_model.session()
    weights = tmp_path / "second" / "draft" / "weights.bin"
    weights.write_bytes(b"")
    with pytest.raises(accel.AccelError, match="draft/weights.bin"):
        accel.load("second")


@pytest.mark.long
def test_a_hugging_face_directory_is_built_along(built, modules, folder, small):
    """It runs where the target does: here by the reference of each operator."""
    recipe = {"draft": {"use": "model", "path": str(folder)}}
    with unmeasured(
        accel.optimize(modules[0], recipe, target="eager", verify=False, **SIZES)
    ) as model:
        assert model.draft_model.artifact is None and model.draft_model.facts.max_batch == 3
        prompts = texts()
        got = model.generate(prompts, 20, eos=[])
        assert got.tokens == built().generate(prompts, 20, eos=[]).tokens
        assert got.stats["speculation"]["accepted"] > 0
    recipe["draft"]["path"] = str(small)
    with pytest.raises(
        RecipeError,
        match="built for batches of up to 3, but the model for 4; build it with max_batch",
    ):
        accel.optimize(
            modules[0], recipe, target="eager", verify=False, max_context=96, max_batch=4
        )


@pytest.mark.long
def test_an_artifact_whose_sessions_cannot_draft_is_refused_when_built(modules, folder, tmp_path):
    dropping = {
        "kv.score": {"use": "knorm"},
        "kv.when": {"use": "every"},
        "kv.budget": {"use": "uniform"},
    }
    for name, made, tree, words in (
        ("drops", dropping, "chain", "cannot rewind"), ("chains", "base", "dyspec", "take no draft trees"),
    ):  # fmt: skip
        accel.optimize(folder, made, out=tmp_path / name, verify=False, **SIZES).close()
        recipe = {"draft": {"use": "model", "path": str(tmp_path / name)}, "tree": {"use": tree}}
        with pytest.raises(InputError, match=words):
            accel.optimize(modules[0], recipe, out=tmp_path / "out", verify=False, **SIZES)
        assert not (tmp_path / "out").exists(), "nothing half-written"


@pytest.mark.long
def test_a_directory_is_stored_as_its_weights_say(modules, folder, tmp_path):
    """In 8 bits, where a recipe says nothing; what an artifact has stays."""
    draft, sizes = {"use": "model", "path": str(folder)}, {}
    for weights in ("int8", ""):
        recipe = {"draft": draft if weights else {**draft, "weights": ""}}
        with accel.optimize(
            modules[0], recipe, out=tmp_path / f"a{weights}", verify=False, **SIZES
        ) as model:
            assert model.draft_model.recipe["tables"].get("weights", {"use": ""})["use"] == weights
            sizes[weights] = (model.draft_model.artifact.path / "weights.bin").stat().st_size
    assert sizes["int8"] < sizes[""]
    with pytest.raises(RecipeError, match="a: draft.*int9.*int8"):
        accel.optimize(
            modules[0], Recipe("a", tables={"draft": {**draft, "weights": "int9"}}), **SIZES
        )


def assisted(module, assistant, prompt, count, drafts):
    """transformers' assisted generation of a constant draft: tokens, and calls of the target."""
    calls, forward = [], module.forward

    def counted(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    module.forward = counted
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = drafts, "constant"
    config.assistant_confidence_threshold = 0.0
    try:
        out = module.generate(
            torch.tensor([prompt]),
            assistant_model=assistant,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=10**6,
        )
    finally:
        module.forward = forward
    return out[0, len(prompt) :].tolist(), len(calls)


@pytest.mark.long
def test_it_takes_as_many_calls_as_transformers(modules, built, monkeypatch):
    """Their first call drafts already, where ours runs the prompt alone; they may overshoot, which is cut here."""
    monkeypatch.setattr("accel.runtime.length.fixed.Fixed.limit", lambda self: 4)
    for prompt in texts(5, 3):
        want, calls = assisted(*modules, prompt, 40, 4)
        got = built("whole model").generate(prompt, 40, eos=[])
        assert got.tokens[0] == want[:40] and len(want) >= 40
        assert abs(got.stats["calls"] - calls) <= 1


def test_what_has_no_tokens_in_common_is_refused_with_both_sides(modules, tmp_path):
    other = models.ARCHITECTURES["qwen2"]()
    other.save_pretrained(tmp_path / "other")
    recipe = {"draft": {"use": "model", "path": str(tmp_path / "other")}}
    with pytest.raises(
        RecipeError,
        match="other has 103 tokens and the model 101, and the model and the draft model ",
    ):
        accel.optimize(modules[0], recipe, target="eager", **SIZES)
    recipe["draft"]["path"] = str(tmp_path / "othre")
    with pytest.raises(
        RecipeError, match="draft.model: .*othre does not exist; set `path` to an artifact"
    ):
        accel.optimize("/no/such/model", recipe)


def test_an_exit_that_is_none_is_refused(built):
    model = built("layerskip")
    count = len(model.facts.depth.plan)
    for layers in (count, count + 4):
        model._methods["draft"], kept = LayerSkip(layers), model._methods["draft"]
        with pytest.raises(
            InputError, match=f"exit = {layers}, but the model has {count} layers; give 1 to"
        ):
            model.generate([5, 6], 9)
        model._methods["draft"] = kept
    assert LayerSkip().layers(model._context()).tolist() == [
        i < max(1, count // 4) for i in range(count)
    ]


@pytest.mark.long
def test_a_draft_model_grows_trees(modules, folder, small):
    """Children are what it finds likeliest after the path to each node, in each row, round after round."""
    recipe = {"draft": {"use": "model", "path": str(folder)}, "tree": {"use": "static"}}
    with unmeasured(
        accel.optimize(modules[0], recipe, target="eager", verify=False, **SIZES)
    ) as model:
        rows, model.draft_model._costs = rows_of(texts()), Costs((1, 32), (0.01, 0.01))
        with model.session(3) as session:
            drafters = model._methods["draft"].open(session, rows, model._context())
            paces = Fixed(12).open(rows, unmeasured_cost)
            for turn in range(3):
                trees = drafters.draft({0: 9, 1: 6, 2: 12} if turn else {2: 9}, paces)
                for i, tree in trees.items():
                    assert tree.branch is not None
                    for node in range(-1, len(tree)):
                        if not (children := list(tree.children(node))):
                            continue
                        path = [*rows[i].seen, *tree.tokens[list(tree.path(node))]]
                        best = np.argsort(-model.draft_model.logits([path])[0, -1], kind="stable")
                        assert tree.tokens[children].tolist() == best[: len(children)].tolist()
                    for token in (*tree.tokens[list(tree.path(len(tree) - 1))], 7):
                        rows[i].accept(int(token), None)
            drafters.close()
        model.draft_model, kept = accel.load(small), model.draft_model
        model.draft_model._costs = kept._costs
        with (
            model.session(1) as session,
            pytest.raises(InputError, match="draft model take no draft trees"),
        ):
            model._methods["draft"].open(session, rows[:1], model._context())
        model.draft_model.close()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"draft": {"use": "layerskip"}, "tree": {"use": "static"}},
            "layerskip cannot be combined with tree = static",
        ),
        ({"draft": {"use": "layerskip", "exit": -1}}, "draft.layerskip: exit is -1"),
        (
            {"draft": {"use": "layerskip"}, "depth": {"use": "shortgpt"}},
            "layerskip cannot be combined with depth = short",
        ),
        (
            {"draft": {"use": "layerskip"}, "depth": {"use": "calm"}},
            "cannot be combined with depth = calm",
        ),
        ({"draft": {"use": "model", "path": 3}}, "draft.model.path = 3 is int, not str"),
    ],
)
def test_recipes_that_cannot_work_are_refused(tables, words):
    with pytest.raises(RecipeError, match=words):
        assemble(Recipe(tables=tables))


def test_layerskip_brings_its_depth():
    plan = assemble(Recipe.load("layerskip"))
    assert plan.recipe.tables["depth"] == {"use": "by-call"} and plan.grade == "distribution-exact"
    assert [type(step).__name__ for step in plan.passes] == ["ByCall", "Replay"]


def test_the_cache_is_shared(built):
    """A draft of the first layers takes no memory, and leaves none of its keys behind."""
    prompt = texts()[0]
    with built("layerskip").session() as session:
        whole = session.run([prompt[:-1]])
        layers = np.arange(len(built("layerskip").facts.depth.plan)) < 1
        before = session.stats["kv_bytes"]
        session.run([[prompt[-1]]], run_layers=layers)
        session.rewind(len(prompt) - 1)
        again = session.run([prompt[-1:]])
        assert session.stats["kv_bytes"] == before
    with built().session() as session:
        assert np.array_equal(session.run([prompt[:-1]]), whole)
        assert np.array_equal(session.run([prompt[-1:]]), again)
