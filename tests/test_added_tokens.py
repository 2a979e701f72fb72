"""Tokens that only the files beside tokenizer.json name: the same as transformers', in builds and in artifacts."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import tokenizers
import transformers

import accel
from accel.compiler.load.source import open_source
from accel.compiler.load.tokenizer import read_tokenizer, write_tokenizer
from accel.ir.errors import CaptureError
from accel.reference import kinds
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.inputs.tokenizer_config import TokenizerConfig

REFERENCE = Path(kinds.__file__).parent
os.environ["HF_HUB_OFFLINE"] = "1"
CONFIG = "tokenizer_config.json"
KNOWN = {t["content"]: t for t in json.loads((REFERENCE / "tokenizer.json").read_text())["added_tokens"]}  # fmt: skip
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
ENTRIES = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in KNOWN.values()}


def folder(path, files):
    """The bundled tokenizer in a folder; `files`: name -> what joins or replaces the JSON of this name."""
    path.mkdir()
    for name in ("tokenizer.json", CONFIG):
        shutil.copy(REFERENCE / name, path / name)
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name, more in files.items():
        file = path / name
        old = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**old, **more}))
    return path


def theirs(path):
    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)


def token(content, **flags):
    return {"content": content, **PLAIN, "special": False, **flags}


THINK = {"4096": token("<think>")}
# name -> (files, a text)
CASES = {
    "decoder": ({CONFIG: {"added_tokens_decoder": {**ENTRIES, **THINK}}}, "<think>x"),
    "added": ({"added_tokens.json": {"<think>": 4096}}, "<think>x"),
    "additional": ({CONFIG: {"additional_special_tokens": ["<|call|>"]}}, "a<|call|>b"),
    "extra": ({CONFIG: {"extra_special_tokens": ["<|call|>", "<|ret|>"]}}, "a<|ret|><|call|>b"),
    "named": ({CONFIG: {"extra_special_tokens": {"call_token": "<|call|>"}}}, "a<|call|>b"),
    "map": ({"special_tokens_map.json": {"additional_special_tokens": ["<|call|>"]}}, "a<|call|>b"),
    "map of objects": (
        {"special_tokens_map.json": {"mask_token": {"content": "<|call|>", **PLAIN, "lstrip": True}}}, "a <|call|>b"
    ),
    "eos": ({CONFIG: {"eos_token": "<|call|>"}}, "a<|call|>b"),
    "eos of the vocabulary": ({CONFIG: {"eos_token": "the"}}, "to the theory"),
    "strips": (
        {CONFIG: {"added_tokens_decoder": {**ENTRIES, "1": {**ENTRIES["1"], "lstrip": True, "rstrip": True}}}},
        "a  <|eos|>  b",
    ),
    "special in tokenizer.json": (
        {CONFIG: {"added_tokens_decoder": {**ENTRIES, "0": {**ENTRIES["0"], "special": False}}, "bos_token": None}},
        "a<|bos|>b",
    ),
    "splits": ({CONFIG: {"split_special_tokens": True}}, "a<|eos|>b"),
    "nothing": ({}, "a<|eos|>b"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_text_has_transformers_tokens(name, tmp_path):
    files, text = CASES[name]
    there = folder(tmp_path / "model", files)
    mine, want = open_source(there).tokenizer, theirs(there)
    assert mine.encode(text) == want(text)["input_ids"]
    assert mine.vocabulary == want.get_vocab()
    ids = [0, 5, 4095, *mine.encode(text), 4096][: None if len(mine.vocabulary) > 4096 else -1]
    assert mine.decode(ids) == want.decode(ids, skip_special_tokens=True)
    bare = Tokenizer((REFERENCE / "tokenizer.json").read_bytes()).encode(text)
    assert (mine.encode(text) != bare) == (name not in ("nothing", "special in tokenizer.json"))


def test_an_untouched_tokenizer_keeps_its_bytes(tmp_path):
    there = folder(tmp_path / "model", {})
    assert open_source(there).tokenizer.json == (there / "tokenizer.json").read_bytes()


TEXTS = [
    "a <|x|> b<|x|>c", "<tool> the </tool>  \n<tool>", "in<|eos|> <|bos|>the", "  <|y|>the<|y|>  ", "<|x|><|y|><tool>",
    "the theory of the thing", "THE THEORY", "x_the_x the.", "é<|x|>🙂 <tool>é",
]  # fmt: skip


def drawn(seed):
    """Files that say something random of added tokens, with ids in a row."""
    rng = random.Random(seed)

    def flags():
        return {k: rng.random() < 0.4 for k in (*PLAIN, "special")}

    new = rng.sample(["<|x|>", "<|y|>", "<tool>", "</tool>", "THE"], rng.randrange(5))
    old = rng.sample(["the", " the", "in", "x"], rng.randrange(3))
    files, config = {}, {}
    if rng.random() < 0.6:
        vocabulary = json.loads((REFERENCE / "tokenizer.json").read_text())["model"]["vocab"]
        told = {str(4096 + i): token(text, **flags()) for i, text in enumerate(new)}
        told |= {str(vocabulary[t]): token(t, **flags()) for t in old if t in vocabulary}
        changed = {
            i: {**t, **flags()} if rng.random() < 0.5 else t
            for i, t in ENTRIES.items()
            if rng.random() < 0.9
        }
        config["added_tokens_decoder"] = {**told, **changed}
    elif rng.random() < 0.5:
        files["added_tokens.json"] = {text: 4096 + i for i, text in enumerate(new)}
    names = ["mask_token", "sep_token", "eos_token", "call_token"]
    for name in rng.sample(names, rng.randrange(3)):
        where = config if rng.random() < 0.6 else files.setdefault("special_tokens_map.json", {})
        where[name] = rng.choice([*new, "<|z|>", "of"])
    if rng.random() < 0.4:
        config["extra_special_tokens"] = rng.sample([*new, "<|x|>", "<|z|>", "<|eos|>"], 2)
    config["split_special_tokens"] = rng.random() < 0.1
    return {**files, CONFIG: config}


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 300), marks=pytest.mark.long)], ids=str
)
def test_any_files_give_transformers_tokens(seeds, tmp_path):
    """And an artifact's files do, read by accel and by transformers. Where transformers' own tokenizer, written and
    read again, cuts a text otherwise, no file can hold it: such texts are few.
    """
    different, unlike = 0, 0
    plain = Tokenizer((REFERENCE / "tokenizer.json").read_bytes())
    for seed in seeds:
        there = folder(tmp_path / str(seed), drawn(seed))
        mine, want = open_source(there).tokenizer, theirs(there)
        reread = tokenizers.Tokenizer.from_str(want.backend_tokenizer.to_str())
        reread.encode_special_tokens = want.split_special_tokens
        made = tmp_path / f"{seed}-made"
        made.mkdir()
        write_tokenizer(mine, made)
        shipped = theirs(made)
        again = Tokenizer(made / "tokenizer.json", TokenizerConfig.read(made))
        for text in TEXTS:
            ids = want(text)["input_ids"]
            if reread.encode(text).ids != ids:
                unlike += 1
                continue
            found = [mine.encode(text), again.encode(text), shipped(text)["input_ids"]]
            assert found == [ids] * 3, (seed, text)
            told = want.decode(ids, skip_special_tokens=True)
            assert [mine.decode(ids), again.decode(ids)] == [told] * 2, (seed, text)
            different += plain.encode(text) != ids
    assert different > len(seeds)  # the files do say something
    assert unlike < 0.05 * len(seeds) * len(TEXTS)


WRONG = {
    "skips": ({CONFIG: {"added_tokens_decoder": {"4100": token("<t>")}}}, "token 4100, and by tokenizer.json it is"),
    "collides": ({CONFIG: {"added_tokens_decoder": {"7": token("<t>")}}}, "'<t>' is token 7, and by"),
    "other id": ({CONFIG: {"added_tokens_decoder": {"9": token("<|eos|>")}}}, "'<|eos|>' is token 9, and by"),
    "old, skips": ({"added_tokens.json": {"<t>": 4097}}, "added_tokens.json says that '<t>' is token 4097"),
    "old, twice": ({"added_tokens.json": {"<t>": 4096, "<u>": 4096}}, "'<u>' is token 4096"),
    "old, text": ({"added_tokens.json": {"<t>": "x"}}, "'<t>' is token 'x'"),
    "list": ({CONFIG: {"added_tokens_decoder": []}}, "added_tokens_decoder is [], not an object"),
    "index": ({CONFIG: {"added_tokens_decoder": {"-1": token("<t>")}}}, "added_tokens_decoder has '-1'"),
    "text": ({CONFIG: {"added_tokens_decoder": {"4096": {}}}}, "added_tokens_decoder 4096 is {}, which has no text"),
    "flag": ({CONFIG: {"added_tokens_decoder": {"4096": token("<t>", lstrip=2)}}}, "has lstrip = 2"),
    "extra": ({CONFIG: {"extra_special_tokens": "<t>"}}, "extra_special_tokens is '<t>', not a list"),
    "extra one": ({CONFIG: {"extra_special_tokens": [3]}}, "extra_special_tokens is 3, which has no text"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name, tmp_path):
    files, words = WRONG[name]
    there = folder(tmp_path / "model", files)
    with pytest.raises(CaptureError) as error:
        assert open_source(there).tokenizer is None
    assert words in str(error.value) and str(there) in str(error.value)


def test_what_a_tokenizer_object_splits(tmp_path):
    there = folder(tmp_path / "model", {CONFIG: {"split_special_tokens": True}})
    want = theirs(there)
    assert read_tokenizer(want).encode("a<|eos|>b") == want("a<|eos|>b")["input_ids"]


@pytest.mark.long
def test_tokens_without_weights_are_told_of(tmp_path):
    there = folder(tmp_path / "model", {CONFIG: {"eos_token": "<|call|>"}})
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(there)
    with accel.optimize(there, "base", max_context=32, out=tmp_path / "a", verify=False) as model:
        (note,) = [n for n in model.report["notes"] if "tokenizer" in n]
        assert "1 token of the tokenizer has no weights in the model ('<|call|>')" in note
        with pytest.raises(accel.InputError, match="token 4096"):
            model.generate("a<|call|>b", 1)
