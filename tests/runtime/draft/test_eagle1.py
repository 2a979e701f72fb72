"""draft = eagle1: drafts are those of the authors' formulas, whatever stood before; tokens are plain decoding's."""

import json

import models
import pytest
import torch

import accel
from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import AccelError, RecipeError
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.eagle_tree import EagleTree

from ...heads_case import (
    Eagle1,
    as_plain,
    drafts,
    eagle1_folder,
    eagle1_tensors,
    llama_in,
    texts_of,
)

FORMS = {"authors": {}, "bias": {"bias": True, "qkv_bias": True}, "speculators": {"bias": True}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The module of a target, and its folder."""
    return llama_in(tmp_path_factory.mktemp("target"), 2)


def head_of(module, folder, form, **more):
    tensors = eagle1_tensors(module, **FORMS[form])
    return eagle1_folder(folder, module, tensors, form == "speculators", **more), tensors


def build(source, path, target="eager", tree="chain", **more):
    recipe = {
        "draft": {"use": "eagle1", "path": str(path), "weights": ""},
        "tree": {"use": tree},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    }
    return accel.optimize(source, recipe, target=target, max_context=64, max_batch=2, **more)


@torch.no_grad()
def features_of(module, tokens, normed=True):
    """What the output head reads of all tokens but the last; not normed: before the last norm."""
    found = []
    hook = module.model.norm.register_forward_hook(
        lambda _, x, y: found.append(y if normed else x[0])
    )
    module(torch.tensor([tokens[:-1]]))
    hook.remove()
    return found[0][0]


@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_draft_is_that_of_the_formulas(home, tmp_path, form):
    """Behind a prompt, and behind tokens that came after other drafts. The controls: the stream before the last norm,
    and the states of the token before.
    """
    module, folder = home
    path, tensors = head_of(module, tmp_path / "head", form)
    head, texts, rounds = Eagle1(tensors, module), texts_of(20), (8, 9, 14)

    def wanted(shift=0, **other):
        return [
            [
                head.chain(features_of(module, t[:n], **other).roll(shift, 0), t[:n], 4)
                for t in texts
            ]
            for n in rounds
        ]

    with build(folder, path) as model:
        assert model.draft_model.facts.draft_head.drafter == "eagle1"
        found = drafts(model, texts, 4, rounds)
    assert found == wanted()
    assert found != wanted(normed=False) and found != wanted(shift=1), "the controls"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("target", "tree", "temperature"),
    [
        ("eager", EagleTree(), 0.0),
        ("onnx", Chain(), 0.9),
        ("onnx", EagleTree(), 0.0),
        ("eager", Chain(), 0.0),
    ],
)
def test_tokens_are_those_of_plain_decoding(home, tmp_path, target, tree, temperature):
    path, _ = head_of(*(home[0], tmp_path / "head", "bias"))
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    with build(home[1], path, target, tree.use, **out) as model:
        assert as_plain(model, tree, temperature, limit=4)


def test_the_format_is_told_by_tensors(home, tmp_path):
    """The configuration of a head is that of a model with one layer."""
    module, folder = home
    path, tensors = head_of(module, tmp_path / "head", "authors")
    assert with_draft("base", path).tables["draft"]["use"] == "eagle1"
    assert head_at(folder) is None
    one = models.make("llama", 1)
    one.save_pretrained(tmp_path / "model")
    assert head_at(tmp_path / "model") is None, "a model of one layer"
    torch.save(tensors, tmp_path / "head/pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert head_at(path).format.method == "eagle1"
    (path / "pytorch_model.bin").write_bytes(b"cut")
    assert head_at(path) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("layers.0.mlp.up_proj.weight"), "lacks layers.0.mlp.up_proj.weight"),
        (lambda t, c: t.update(extra=torch.ones(2)), "has extra .1 tensors more"),
        (lambda t, c: t["fc.weight"].fill_(torch.nan), "fc.weight holds numbers that are not fi"),
        (lambda t, c: c.update(intermediate_size="a"), "intermediate_size = 'a'; a head needs"),
        (lambda t, c: c.update(vocab_size=90), "has 90 tokens and the model 101"),
        (lambda t, c: c.update(hidden_size=40), "reads states of 40 numbers, .* of 48"),
        (lambda t, c: c.update(layernorms=True), "says layernorms, and accel reads heads of EAGLE"),
    ],
)
@pytest.mark.few(3)
def test_wrong_heads_are_refused(home, tmp_path, change, words):
    module, folder = home
    tensors = eagle1_tensors(module)
    path = eagle1_folder(tmp_path / "head", module, tensors)
    config = json.loads((path / "config.json").read_text())
    change(tensors, config)
    eagle1_folder(path, module, tensors)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AccelError, match=words):
        build(folder, path).close()


def test_the_bundled_head_is_for_the_bundled_model(home):
    with pytest.raises(RecipeError, match="reads states of 256 numbers, and the model's are of 48"):
        build(home[1], "")
