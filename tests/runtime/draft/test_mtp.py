"""draft = mtp: drafts are those of transformers' next-token layer, whatever stood before; tokens are plain's."""

import json
from functools import cache

import models
import pytest
import torch
from safetensors.torch import load_file, save_file

import accel
from accel.compiler.load.heads._folder import HeadFolder, head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import CaptureError, RecipeError
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.eagle_tree import EagleTree

from ...heads_case import (
    as_plain,
    drafts,
    eagle3_folder,
    eagle3_tensors,
    mtp_chain,
    mtp_folder,
    target_of,
    texts_of,
)
from ...quantised_case import FORMATS

KINDS = {"glm4_moe": 2, "deepseek_v3": 2, "qwen3_5_text": 4, "qwen3_next": 4}


@cache
def module_of(kind):
    torch.manual_seed(3)
    return models.make(kind, KINDS[kind]).eval()


def recipe(tree="chain", **more):
    return {
        "draft": {"use": "mtp", "weights": "", **more},
        "tree": {"use": tree},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    }


def build(path, target="eager", tree="chain", **more):
    return accel.optimize(path, recipe(tree), target=target, max_context=64, max_batch=2, **more)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_that_of_the_module(tmp_path, kind):
    """Behind a prompt, and behind tokens that came after other drafts. The controls: the stream before the last norm,
    and the states of the token before.
    """
    module = module_of(kind)
    layers, texts, rounds = mtp_folder(module, tmp_path), texts_of(20), (8, 9, 14)

    def wanted(**other):
        return [[mtp_chain(module, layers, t[:n], 4, **other) for t in texts] for n in rounds]

    with build(tmp_path) as model:
        found = drafts(model, texts, 4, rounds)
    assert found == wanted()
    assert found != wanted(states="stream") and found != wanted(shift=1), "the controls"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "target", "tree", "temperature"),
    [
        ("qwen3_5_text", "eager", Chain(), 0.0),
        pytest.param("glm4_moe", "onnx", Chain(), 0.9, marks=pytest.mark.long),
        pytest.param("deepseek_v3", "onnx", Chain(), 0.0, marks=pytest.mark.long),
        ("glm4_moe", "eager", EagleTree(), 0.0),
        pytest.param("qwen3_next", "onnx", Chain(), 0.9, marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_tokens_are_those_of_plain_decoding(tmp_path, kind, target, tree, temperature):
    mtp_folder(module_of(kind), tmp_path)
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    with build(tmp_path, target, tree.use, **out) as model:
        assert as_plain(model, tree, temperature, limit=4)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Its folder, and what its files hold."""
    folder = tmp_path_factory.mktemp("mtp")
    layers = mtp_folder(module_of("glm4_moe"), folder, num_nextn_predict_layers=2)
    config = json.loads((folder / "config.json").read_text())
    return layers, config, load_file(folder / "model.safetensors")


def written(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return HeadFolder(folder, "mtp", target_of(tensors.get("lm_head.weight", torch.zeros(101, 64))))


LAYER = "model.layers.2."


@torch.no_grad()
def test_what_is_shared_and_layers_behind_the_first_are_left(tmp_path, published):
    layers, config, tensors = published
    more = {LAYER + "shared_head.head.weight": torch.zeros(101, 64)}
    more |= {LAYER + "embed_tokens.weight": torch.zeros(101, 64)}
    more |= {n.replace(LAYER, "model.layers.3."): 9 * t for n, t in tensors.items() if LAYER in n}
    loaded = written(tmp_path, config, {**tensors, **more}).load()
    ((weight, stored),) = loaded.stored.items()
    assert loaded.model.layers.shared_head.weight is weight
    assert stored.read().equal(tensors["lm_head.weight"])
    want, found = layers.layers.state_dict(), loaded.model.layers.layers.state_dict()
    assert want.keys() == found.keys() and all(found[n].equal(want[n]) for n in want)


def test_a_layer_by_itself(tmp_path):
    """As speculators has it: experts in one tensor, no output head, which is the target's."""
    layers = mtp_folder(module_of("qwen3_next"), tmp_path / "target")
    text = json.loads((tmp_path / "target/config.json").read_text())
    names = {
        **{"enorm": "token_layernorm", "hnorm": "hidden_layernorm"},
        **{"eh_proj": "input_proj", "post_norm": "final_layernorm"},
    }
    tensors = {}
    for name, tensor in layers.layers[0].state_dict().items():
        first, _, rest = name.partition(".")
        tensors["mtp_layers.0." + (f"{names[first]}.{rest}" if first in names else rest)] = tensor
    config = {
        **{"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"]},
        **{"num_nextn_predict_layers": 1, "transformer_layer_config": text},
    }
    (tmp_path / "head").mkdir()
    written(tmp_path / "head", config, tensors)
    assert with_draft("base", tmp_path / "head").tables["draft"]["use"] == "mtp"
    head = head_at(tmp_path / "head", target=target_of(layers.shared_head.weight, 4))
    head.format.check(head.path, head.json)
    loaded = head.load()
    found, want = loaded.model.layers.layers.state_dict(), layers.layers.state_dict()
    assert want.keys() == found.keys() and all(found[n].equal(want[n]) for n in want)
    assert next(iter(loaded.stored.values())).read().equal(layers.shared_head.weight)
    with pytest.raises(CaptureError, match="by the output head of its target, .* is no product"):
        head_at(tmp_path / "head").load()


@pytest.mark.few(1)
@pytest.mark.parametrize("narrow", ["fp8", "bfloat16"])
def test_layers_in_few_bits(tmp_path, narrow):
    """As DeepSeek-V3 is published: fp8 blocks; or half of a float."""
    layers = mtp_folder(module_of("deepseek_v3"), tmp_path)
    config, tensors = (
        json.loads((tmp_path / "config.json").read_text()),
        load_file(tmp_path / "model.safetensors"),
    )
    name, want = LAYER + "eh_proj.weight", layers.layers[0].eh_proj.weight.detach()
    if narrow == "fp8":
        form, write, _ = FORMATS["fp8"]
        config["quantization_config"] = form
        parts, want = write(tensors.pop(name))
        tensors |= {LAYER + "eh_proj." + part: t.clone() for part, t in parts.items()}
    else:
        config["dtype"] = "bfloat16"
        tensors = {n: t.bfloat16() for n, t in tensors.items()}
        want = want.bfloat16().float()
    loaded = written(tmp_path, config, tensors).load()
    assert loaded.model.layers.layers[0].eh_proj.weight.equal(want)


def test_a_model_of_images(tmp_path):
    """Qwen3.5's text model lies within another."""
    module = module_of("qwen3_5_text")
    mtp_folder(module, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    tensors = load_file(tmp_path / "model.safetensors")
    config = {"model_type": "qwen3_5", "text_config": text}
    head = written(tmp_path, config, tensors)
    head.format.check(tmp_path, head.json)
    assert head.load().model.draft_head.width == 64
    assert head.vocab_size == 101 and head.format.target_width(head.json) == 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: c.update(num_nextn_predict_layers=0), "num_nextn_predict_layers = 0, so the"),
        (lambda t, c: c.update(num_nextn_predict_layers="a"), "= 'a'; a head needs a whole number"),
        (
            lambda t, c: [t.pop(n) for n in list(t) if LAYER in n],
            "hold no next-token layer .* says num_nextn_predict_layers = 2",
        ),
        (lambda t, c: c.update(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings"),
        (lambda t, c: t.pop(LAYER + "eh_proj.weight"), "lacks layers.0.eh_proj.weight"),
        (lambda t, c: t.update({LAYER + "extra": torch.ones(2)}), "extra .1 of .. tensors. has no"),
        (lambda t, c: t[LAYER + "enorm.weight"].fill_(torch.nan), "enorm.weight .* not finite"),
        (
            lambda t, c: t.update({LAYER + "eh_proj.weight": torch.ones(64, 64)}),
            r"eh_proj.weight has size \[64, 64\], and \[64, 128\]",
        ),
        (lambda t, c: t.update({"lm_head.weight": torch.ones(9, 64)}), "output head has size .9"),
        (lambda t, c: c.update(model_type="llama"), "no place in transformers' LlamaDecoderLayer"),
        (lambda t, c: c.update(model_type="gpt2"), "model_type 'gpt2' has no rotary positions"),
        (lambda t, c: c.update(model_type="mellum"), "no next-token layer of model_type 'mellum'"),
        (
            lambda t, c: c.update(model_type="mellum", num_nextn_predict_layers=1),
            "has sliding_attention, and accel reads those of full attention",
        ),
    ],
)
def test_wrong_layers_are_refused(tmp_path, published, change, words):
    _, config, tensors = published
    config, tensors = dict(config), {n: t.clone() for n, t in tensors.items()}
    change(tensors, config)
    head = written(tmp_path, config, tensors)
    with pytest.raises(CaptureError, match=words):
        head.format.check(tmp_path, head.json)
        head.load()


@pytest.mark.long
def test_where_the_layers_come_from(tmp_path, published):
    with pytest.raises(
        RecipeError, match="from the directory or the GGUF file of the model, and th"
    ):
        accel.optimize(module_of("glm4_moe"), recipe(), target="eager")
    head = written(tmp_path, *published[1:])
    assert head_at(tmp_path) is None, "a model is no head"
    assert with_draft(recipe(), tmp_path).tables["draft"]["path"] == str(tmp_path)
    assert head_at(tmp_path, method="mtp").format is head.format
    path = eagle3_folder(tmp_path / "e", eagle3_tensors(64, 32, 101, 40), 64, 101)
    with pytest.raises(RecipeError, match="use draft = eagle3 for it, or give another head"):
        accel.optimize(tmp_path, recipe(path=str(path)), target="eager", max_context=64).close()
