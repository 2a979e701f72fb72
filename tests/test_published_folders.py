"""Folders as people publish them: older spellings, tokens at the edge of a vocabulary, weights apart."""

import json
import shutil

import models
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import accel
from accel.compiler.load.source import open_source
from accel.compiler.load.tokenizer import end_note, read_tokenizer
from accel.ir.errors import CaptureError

OPTIONS = {"max_context": 64, "verify": False, "target": "eager"}
IDS = [[3, 9, 30, 5, 2, 1, 30, 7, 8, 22, 4, 9, 17, 3, 11, 6]]
YARN = {"factor": 4, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
OLDER = {  # what stands in place of rope_parameters
    "null": {"rope_scaling": None, "rope_theta": 50000},
    "type": {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 10000},
    "both": {"rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}, "rope_theta": 1e4},
    "none of them": {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": None}},
    "default": {"rope_scaling": {"type": "default"}, "rope_theta": 50000.0},
    "theta alone": {"rope_parameters": {"rope_theta": 50000.0}},
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 31}
    model = models.random(
        "llama", **sizes, num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=64
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(published, tmp_path):
    return shutil.copytree(published, tmp_path / "model")


def say(folder, *without, **config):
    """Change what config.json says."""
    told = json.loads((folder / "config.json").read_text())
    told = {k: v for k, v in told.items() if k not in without} | config
    (folder / "config.json").write_text(json.dumps(told))


def check_logits(folder):
    """A build's logits are transformers' of the same folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor(IDS), use_cache=False).logits
    with accel.optimize(folder, **OPTIONS) as built:
        got = torch.from_numpy(built.logits(IDS))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OLDER)
def test_older_spellings_of_rotation(folder, name):
    say(folder, "rope_parameters", **OLDER[name])
    check_logits(folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("padding", [-1, 30, 0])
def test_padding_at_the_edge_of_a_vocabulary(folder, padding):
    """Where a token pads, capture tries others in its place, which must be tokens too."""
    say(folder, pad_token_id=padding)
    check_logits(folder)


def shard(folder, names=("model-00001-of-00002", "model-00002-of-00002")):
    """Cut the weights in two. The index of it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    order = sorted(tensors)
    places = {}
    for name, part in zip(names, (order[::2], order[1::2]), strict=True):
        save_file({key: tensors[key] for key in part}, folder / f"{name}.safetensors")
        places |= dict.fromkeys(part, f"{name}.safetensors")
    return {"metadata": {}, "weight_map": places}


def test_weights_beside_those_of_the_index_are_not_read(folder):
    wrong = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shard(folder)))
    save_file(wrong, folder / "consolidated.safetensors")
    save_file(wrong, folder / "model-00003-of-00003.safetensors")
    check_logits(folder)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("model-00001-of-00002", "model-00002-of-00002"), "fetch model.safetensors.index.json of"),
        (
            ("consolidated-1", "consolidated-2"),
            "but consolidated-1.safetensors, .*in transformers'",
        ),
    ],
)
def test_weights_without_an_index_are_refused(folder, names, words):
    shard(folder, names)
    with pytest.raises(CaptureError, match=words):
        accel.optimize(folder, **OPTIONS)


@pytest.fixture
def tokenizer(folder):
    """A folder whose tokenizer ends a text by token 7."""
    words = {**{f"w{i}": i for i in range(31)}, "<|im_end|>": 7}
    words = {text: i for text, i in words.items() if text != "w7"}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    made.add_special_tokens(["<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return read_tokenizer(folder)


@pytest.mark.long
def test_a_tokenizer_that_ends_texts_otherwise_is_noted(folder, tokenizer):
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    with accel.optimize(folder, **OPTIONS) as built:
        notes = [note for note in built.report["notes"] if "ends a text" in note]
        assert notes == [end_note(tokenizer, (2, 3))]
        assert "'<|im_end|>', token 7" in notes[0]
        assert "by tokens [2, 3]" in notes[0]
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    with accel.optimize(folder, **OPTIONS) as built:
        assert not any("ends a text" in note for note in built.report["notes"])
    assert "by none" in end_note(tokenizer, ())
    assert open_source(folder).no_tokenizer is None
