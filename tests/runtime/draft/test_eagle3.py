"""draft = eagle3: drafts are those of the published formulas, whatever stood before; tokens are plain decoding's."""

import json

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import AccelError, CaptureError, RecipeError
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.serve.engine import Engine, Request
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.eagle_tree import EagleTree

from ...heads_case import PROMPTS, Eagle3, as_plain, drafts, eagle3_folder, eagle3_tensors, texts_of

LAYERS, DRAFTED = 8, 40
FORMS = {
    "authors": {},
    "normed": {"fc_norm": True, "norm_output": True},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True},
    "whole": {},
}


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(3)
    return models.make("llama", LAYERS).eval()


def head_of(module, folder, form, **more):
    """Its folder, and the plain one."""
    width, vocabulary = module.config.hidden_size, module.config.vocab_size
    config = FORMS[form]
    tensors = eagle3_tensors(
        *(width, 32, vocabulary, vocabulary if form == "whole" else DRAFTED),
        own=True if form in ("speculators", "authors") else width != 32,
        fc_norm="fc_norm" in config,
        input_norm="norm_before_fc" in config,
    )
    named = form == "speculators"
    path = eagle3_folder(folder, tensors, width, vocabulary, named, **config, **more)
    return path, Eagle3(tensors, "norm_before_residual" in config, "norm_output" in config)


def build(module, path, target="eager", tree="chain", **more):
    recipe = {
        "draft": {"use": "eagle3", "path": str(path), "weights": ""},
        "tree": {"use": tree},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    }
    return accel.optimize(module, recipe, target=target, max_context=64, max_batch=2, **more)


@torch.no_grad()
def taps_of(module, tokens, ids=(2, LAYERS // 2, LAYERS - 3)):
    """What goes into three layers, for all tokens but the last."""
    states = module(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    return [states[k][0] for k in ids]


@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_draft_is_that_of_the_formulas(module, tmp_path, form):
    """Behind a prompt, and behind tokens that came after other drafts. The control: taps of the layer before."""
    path, head = head_of(module, tmp_path / "head", form)
    embedding, texts, rounds = (
        module.get_input_embeddings().weight.detach(),
        texts_of(20),
        (8, 9, 14),
    )

    def wanted(**other):
        return [
            [
                head.chain(embedding, taps_of(module, text[:n], **other), text[:n], 4)
                for text in texts
            ]
            for n in rounds
        ]

    with build(module, path) as model:
        found = drafts(model, texts, 4, rounds)
    with torch.no_grad():
        assert found == wanted()
        assert found != wanted(ids=(1, LAYERS // 2 - 1, LAYERS - 4)), (
            "the control: off by one layer"
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["eager", "onnx"])
@pytest.mark.parametrize(
    ("tree", "temperature"), [(Chain(), 0.0), (EagleTree(), 0.0), (Chain(), 0.9)]
)
def test_tokens_are_those_of_plain_decoding(module, tmp_path, target, tree, temperature):
    path, _ = head_of(module, tmp_path / "head", "authors")
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    with build(module, path, target, tree.use, **out) as model:
        assert as_plain(model, tree, temperature, limit=4)


@pytest.mark.long
def test_a_head_that_says_what_the_target_does_is_accepted(module, tmp_path):
    """The target's own head reads its last stream: with taps of it alone a draft's first token is the target's."""
    width, vocabulary = module.config.hidden_size, module.config.vocab_size
    tensors = eagle3_tensors(width, width, vocabulary, vocabulary)
    tensors |= {
        n: torch.zeros_like(t) for n, t in tensors.items() if "o_proj" in n or "down_proj" in n
    }
    assert not tensors["midlayer.mlp.down_proj.weight"].any()
    ids = [1, 2, LAYERS]
    tensors["fc.weight"] = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], 1)
    tensors["norm.weight"] = module.get_decoder().norm.weight.detach()
    tensors["lm_head.weight"] = module.get_output_embeddings().weight.detach()
    path = eagle3_folder(
        tmp_path / "head", tensors, width, vocabulary, eagle_aux_hidden_state_layer_ids=ids
    )
    text = texts_of(12)[0]
    with torch.no_grad():
        logits = module(torch.tensor([text[:-1]])).logits[0]
    with build(module, path) as model:
        (found,) = drafts(model, [text], 1, (12,))
    assert found == [[int(logits[-1].argmax())]], (
        "it knows what the target said of the last token but one"
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("fc.weight"), "lacks fc.weight .1 of 14 tensors"),
        (lambda t, c: t.update(extra=torch.zeros(2)), "has extra .1 tensors more"),
        (lambda t, c: t.pop("d2t"), "has 40 tokens of 101, and no d2t says which"),
        (lambda t, c: t["d2t"].__setitem__(0, 900), "d2t names token 900, and the target has 101"),
        (lambda t, c: t["norm.weight"].__setitem__(0, float("nan")), "norm.weight holds numbers"),
        (lambda t, c: c.update(hidden_size=64), "has size .*, and .* by its config.json"),
        (lambda t, c: c.update(hidden_size="a"), "hidden_size = 'a'; a head needs a whole number"),
        (
            lambda t, c: c.update(vocab_size="many"),
            "vocab_size = 'many'; a head needs a whole number",
        ),
        (lambda t, c: c.update(vocab_size=90), "has 90 tokens and the model 101"),
        (
            lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[2, 3, 9]),
            r"output of the step 'stream.8' does not exist",
        ),
        (lambda t, c: c.update(target_hidden_size=40), "reads states of 40 numbers, .* of 48"),
    ],
)
def test_wrong_heads_are_refused(module, tmp_path, change, words):
    width, vocabulary = module.config.hidden_size, module.config.vocab_size
    tensors = eagle3_tensors(width, 32, vocabulary, DRAFTED, own=True)
    path = eagle3_folder(tmp_path / "head", tensors, width, vocabulary)
    config = json.loads((path / "config.json").read_text())
    change(tensors, config)
    eagle3_folder(
        path,
        {"norm.weight": torch.ones(32), "lm_head.weight": torch.ones(1, 1), **tensors},
        width,
        9,
    )
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AccelError, match=words):
        build(module, path).close()


def test_a_head_is_given_beside_the_model(module, tmp_path):
    """To the recipe that is taken where none is named, which decodes token by token; not to one that drafts itself."""
    path, _ = head_of(module, tmp_path / "head", "authors")
    more = {"target": "eager", "max_context": 64, "max_batch": 1}
    with (
        accel.optimize(module, draft=path, **more) as model,
        accel.optimize(module, **more) as base,
    ):
        assert model.facts.draft_head is None and model.draft_model.facts.draft_head is not None
        want = base.generate(PROMPTS[0], max_new_tokens=12).tokens
        assert model.generate(PROMPTS[0], max_new_tokens=12).tokens == want
    with pytest.raises(
        RecipeError, match="drafts with draft = prompt-lookup, and .* draft = eagle3"
    ):
        accel.optimize(module, "prompt-lookup", draft=path, **more)


def test_what_is_no_head(module, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(RecipeError, match="holds a model, not a head"):
        build(module, tmp_path)
    with pytest.raises(RecipeError, match="does not exist|cannot be read"):
        build(module, tmp_path / "none")
    path, _ = head_of(module, tmp_path / "head", "authors")
    with pytest.raises(CaptureError, match="drafts for a model, not a model; give it beside one"):
        accel.optimize(path, "base", target="eager")


@pytest.mark.long
def test_requests_of_a_server_get_what_they_get_alone(module, tmp_path, monkeypatch):
    """Rows join while others draft, and leave."""
    monkeypatch.setattr(CompiledModel, "costs", None)  # nothing weighs whether drafts pay
    path, _ = head_of(module, tmp_path / "head", "authors")
    rng = np.random.default_rng(5)
    asked = [
        Request(rng.integers(1, 100, 3 + 4 * i), SamplingParams(max_tokens=4 + 5 * (i % 3), seed=i))
        for i in range(5)
    ]
    with build(module, path) as model:
        want = [model.generate(one.prompt, sampling_params=one.params).tokens[0] for one in asked]
        with Engine(model) as engine:
            tickets = [engine.submit(one) for one in asked]
            assert [[event.token for event in ticket] for ticket in tickets] == want
            assert engine.stats["drafted_total"] > 0
