"""draft = peagle: drafts are those of one pass over masks, whatever stood before; tokens are plain decoding's."""

import json
from types import SimpleNamespace

import models
import pytest
import torch

import accel
from accel.compiler import draft_build
from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import CaptureError, RecipeError
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.eagle_tree import EagleTree

from ...heads_case import (
    Eagle3,
    as_plain,
    drafts,
    eagle3_folder,
    eagle3_tensors,
    peagle_chain,
    texts_of,
)

LAYERS, DRAFTED, MASK, COUNT = 8, 40, 7, 5


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(3)
    return models.make("llama", LAYERS).eval()


def head_of(module, folder, **more):
    """Its folder, and the plain one."""
    width, vocabulary = module.config.hidden_size, module.config.vocab_size
    tensors = eagle3_tensors(width, 32, vocabulary, DRAFTED, own=True)
    g = torch.Generator().manual_seed(9)
    tensors["mask_hidden"] = torch.randn(1, 1, 3 * width, generator=g)
    told = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": COUNT}]}
    config = {"speculators_model_type": "peagle", "speculators_config": told, "mask_token_id": MASK}
    path = eagle3_folder(folder, tensors, width, vocabulary, True, **{**config, **more})
    return path, Eagle3(tensors)


def build(module, path, target="eager", tree="chain", **more):
    recipe = {
        "draft": {"use": "peagle", "path": str(path), "weights": ""},
        "tree": {"use": tree},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    }
    return accel.optimize(module, recipe, target=target, max_context=64, max_batch=2, **more)


@torch.no_grad()
def test_a_draft_is_that_of_one_pass(module, tmp_path):
    """Behind a prompt, and behind tokens that came after other drafts. The controls: what the head says one after the
    other, and another mask.
    """
    path, head = head_of(module, tmp_path / "head")
    embedding = module.get_input_embeddings().weight.detach()
    texts, rounds = texts_of(20), (8, 9, 14)

    def taps(tokens):
        states = module(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        return [states[k][0] for k in (2, LAYERS // 2, LAYERS - 3)]

    def wanted(mask):
        return [
            [peagle_chain(head, embedding, taps(t[:n]), t[:n], COUNT, mask) for t in texts]
            for n in rounds
        ]

    with build(module, path) as model:
        assert model.draft_model.facts.draft_head.parallel == COUNT
        found = drafts(model, texts, COUNT + 2, rounds)
    assert found == wanted(MASK) and found != wanted(MASK + 1)
    assert found != [
        [head.chain(embedding, taps(t[:n]), t[:n], COUNT) for t in texts] for n in rounds
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("target", "tree", "temperature"),
    [("onnx", EagleTree(), 0.0), ("eager", Chain(), 0.9), ("onnx", Chain(), 0.0)],
)
def test_tokens_are_those_of_plain_decoding(module, tmp_path, target, tree, temperature):
    path, _ = head_of(module, tmp_path / "head")
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    with build(module, path, target, tree.use, **out) as model:
        assert as_plain(model, tree, temperature, limit=4)


def test_what_is_no_such_head(module, tmp_path):
    path, _ = head_of(module, tmp_path / "head", mask_token_id=101)
    assert with_draft("base", path).tables["draft"]["use"] == "peagle"
    with pytest.raises(CaptureError, match="mask_token_id is 101, of 101 tokens"):
        head_at(path).load()
    path, _ = head_of(module, tmp_path / "none", mask_token_id=None)
    with pytest.raises(CaptureError, match="mask_token_id = None; a head needs a whole number"):
        head_at(path).load()
    config = json.loads((path / "config.json").read_text())
    config["speculators_model_type"] = "eagle3"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="use draft = eagle3 for it, or give another head"):
        build(module, path)


@pytest.mark.parametrize(
    ("trained_for", "model", "fits"),
    [
        (["Qwen3ForCausalLM"], ["LlamaForCausalLM"], False),
        (["LlamaForCausalLM"], ["LlamaForCausalLM"], True),
        (["LlamaForConditionalGeneration"], ["LlamaForCausalLM"], True),
        (["Qwen3ForCausalLM"], None, True),  # a model that does not say what it is
        (None, ["LlamaForCausalLM"], True),
    ],
)
def test_a_head_of_another_architecture_is_refused(module, tmp_path, trained_for, model, fits):
    told = {"proposal_methods": [], "verifier": {"architectures": trained_for}}
    path, _ = head_of(module, tmp_path / "head", speculators_config=told)
    target = SimpleNamespace(config={**module.config.to_dict(), "architectures": model})
    if fits:
        return draft_build._check_head(head_at(path), target)
    with pytest.raises(
        RecipeError, match="was trained for Qwen3ForCausalLM .* and the model is LlamaForCausalLM"
    ):
        draft_build._check_head(head_at(path), target)
