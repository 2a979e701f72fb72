"""Next-token layers in GGUF files: those of the checkpoint that the file was made from."""

import pytest
import torch

import accel
from accel.compiler.load.heads._folder import head_at
from accel.compiler.load.source import open_source
from accel.ir.errors import CaptureError, RecipeError

from .gguf_case import metadata, nextn, write
from .gguf_models import MODELS
from .heads_case import mtp_layers, target_of

KINDS = ("glm4moe", "qwen35", "qwen35moe", "qwen3next")


def written(name, path, kind="F32", change=lambda tensors: tensors):
    """A file with a next-token layer, its model, and transformers' module of the layer."""
    case = MODELS[name]
    model = case.made()
    layers = mtp_layers(model)
    count = model.config.num_hidden_layers
    told = metadata(case.arch, {**case.told, "block_count": count + 1, "nextn_predict_layers": 1})
    tensors = change(list(nextn(layers, model.config, case.arch)))
    return model, layers, write(model, case.arch, path, kind, more=told, tensors=tensors)


@torch.no_grad()
@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_the_layer_is_that_of_the_checkpoint(name, tmp_path):
    model, layers, path = written(name, tmp_path / "m.gguf")
    head = head_at(path, "mtp", target_of(model.lm_head.weight, model.config.num_hidden_layers))
    head.format.check(path, head.json)
    loaded = head.load()
    found, want = loaded.model.layers.layers.state_dict(), layers.layers.state_dict()
    assert found.keys() == want.keys()
    for part, value in want.items():
        assert torch.allclose(found[part], value, atol=1e-6), part
    assert open_source(path).load().model.config.num_hidden_layers == model.config.num_hidden_layers


@pytest.mark.long
def test_a_file_drafts_with_its_layer(tmp_path):
    """In the codes of the file, with its own output head; greedy tokens are plain decoding's."""
    _, _, path = written("glm4moe", tmp_path / "m.gguf", "Q8_0")
    more = {"target": "eager", "max_context": 64, "verify": False}
    with (
        accel.optimize(path, "mtp", **more) as model,
        accel.optimize(path, "base", **more) as base,
    ):
        assert model.draft_model.facts.draft_head.drafter == "mtp"
        found = model.generate([[3, 5, 9, 20, 41]], max_new_tokens=8, eos=[])
        want = base.generate([[3, 5, 9, 20, 41]], max_new_tokens=8, eos=[])
    assert found.tokens == want.tokens


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ts: [t for t in ts if "eh_proj" not in t[0]], "lacks .*eh_proj.weight"),
        (lambda ts: [*ts, ("blk.2.nextn.more.weight", ts[0][1])], "nextn.more.weight has no place"),
        (lambda ts: [t for t in ts if "nextn" in t[0]], "lacks .*mtp_block"),
        (lambda ts: [], "its files hold no next-token layer"),
    ],
)
def test_wrong_layers_are_refused(change, words, tmp_path):
    model, _, path = written("glm4moe", tmp_path / "m.gguf", change=change)
    head = head_at(path, "mtp", target_of(model.lm_head.weight))
    with pytest.raises(CaptureError, match=words):
        head.format.check(path, head.json)
        head.load()


def test_a_file_without_one(tmp_path):
    case = MODELS["glm4moe"]
    path = write(case.made(), case.arch, tmp_path / "m.gguf", more=metadata(case.arch, case.told))
    with pytest.raises(CaptureError, match="num_nextn_predict_layers = 0, so the model has no"):
        accel.optimize(path, "mtp", target="eager", max_context=64)
    assert head_at(path) is None, "a model is no head"
    with pytest.raises(RecipeError, match="from the directory or the GGUF file of the model"):
        accel.optimize(case.made(), "mtp", target="eager")
