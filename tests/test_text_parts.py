"""Folders of models that also read images: the language model within, as the whole model computes text."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import accel
from accel.compiler.load.source import Folder
from accel.ir.errors import CaptureError

TEXT = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SIGHT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
QWEN = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
}
TURNS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
DEEP = {**QWEN, "deepstack_visual_indexes": [0]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LFM2 = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
# configuration: of the language model, of what reads images
KINDS = {
    "LlavaConfig": ({"model_type": "llama"}, {"model_type": "clip_vision_model", **SIGHT}),
    "Mistral3Config": (
        {"model_type": "mistral", "head_dim": 8},
        {"model_type": "pixtral", **SIGHT},
    ),
    "Idefics3Config": ({"model_type": "llama"}, {"model_type": "idefics3_vision", **SIGHT}),
    "Lfm2VlConfig": (
        {"model_type": "lfm2", **LFM2},
        {"model_type": "siglip2_vision_model", **SIGHT, "num_patches": 16},
    ),
    "Qwen2_5_VLConfig": ({"model_type": "qwen2_5_vl_text", **TURNS}, QWEN),
    "Qwen3VLConfig": ({"model_type": "qwen3_vl_text", **TURNS, "head_dim": 8}, DEEP),
    "Qwen3VLMoeConfig": ({"model_type": "qwen3_vl_moe_text", **TURNS, **EXPERTS}, DEEP),
    "Glm4vConfig": ({"model_type": "glm4v_text", **TURNS}, QWEN),
}
IDS = np.random.default_rng(0).integers(3, 90, (1, 12))


def made(name, folder, **more):
    """A model of one kind in a folder, and what it computes of text."""
    text, sight = KINDS[name]
    config = getattr(hf, name)(text_config={**TEXT, **text}, vision_config=dict(sight), **more)
    torch.manual_seed(0)
    model = hf.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:
                tensor.mul_(4)
        model.tie_weights()
        logits = model(input_ids=torch.tensor(IDS)).logits.numpy()
    model.save_pretrained(folder)
    return folder, logits


def far(folder, want):
    with accel.optimize(folder, "base", target="eager", max_context=32, verify=False) as compiled:
        (note,) = [n for n in compiled.facts.notes if n.startswith("the language model of")]
        assert "are left out, so it reads text" in note
        assert not any("does not use" in n for n in compiled.facts.notes)
        with compiled.session() as session:
            first = session.run(IDS[:, :7])
            return np.abs(np.concatenate([first, session.run(IDS[:, 7:])], 1) - want).max()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_text_is_that_of_the_whole_model(name, tmp_path):
    folder, want = made(name, tmp_path)
    assert far(folder, want) < 1e-5 * np.abs(want).max()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["Qwen2_5_VLConfig", "LlavaConfig"])
def test_a_tied_head(name, tmp_path):
    """Said beside the parts, not in them."""
    folder, want = made(name, tmp_path, tie_word_embeddings=True)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert not any("lm_head" in n for n in load_file(folder / "model.safetensors"))
    assert far(folder, want) < 1e-5 * np.abs(want).max()


def test_a_flat_configuration(tmp_path):
    """As Qwen2.5-VL is published: sizes of the language model on top."""
    folder, want = made("Qwen2_5_VLConfig", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    text.pop("model_type")
    (folder / "config.json").write_text(json.dumps({**text, **config}))
    assert Folder(folder).vocab_size == 101
    assert far(folder, want) < 1e-5 * np.abs(want).max()


def test_what_lacks(tmp_path):
    folder, _ = made("LlavaConfig", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("language_model.model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CaptureError, match="lacks 1 of .* model.layers.1.mlp.up_proj.weight"):
        accel.optimize(folder, "base", target="eager")
