"""Folders without tokenizer.json: the tokenizer of their older files is transformers', or the build says why not."""

import json
import random
import shutil

import models
import pytest
import tokenizers
import transformers

import accel
from accel.compiler.load.converted import converted
from accel.compiler.load.source import open_source
from accel.compiler.load.tokenizer import read_tokenizer
from accel.ir.errors import CaptureError

WORDS = (
    "Hello", "world", "don't", "I'LL", "12345", "3.14", "naïve", "Straße", "İstanbul", "e\u0301te\u0301",
    "ﬁn", "Ελλάδα",
    "Привет", "мир", "Ґудзик", "שלום", "مرحبا", "بالعالم", "नमस्ते", "বাংলা", "தமிழ்", "ไทย", "ລາວ", "ខ្មែរ", "မြန်မာ",
    "ქართული",
    "Հայերեն", "አማርኛ", "你好", "世界", "こんにちは", "カタカナ", "한국어", "ᠮᠣᠩᠭᠣᠯ", "ꦗꦮ",
    "😀", "👩‍👩‍👧", "🇩🇪", "𝔘𝔫𝔦", "\u200d", "\u00a0",
    "\t", "\n", "\r\n", "  ", "_", "#!", "</s>", "<|endoftext|>", "<s>", "[CLS]", "▁x", "\ufffd", "\x00",
)  # fmt: skip


def texts(count):
    """Strings of many scripts."""
    draw = random.Random(3)
    joined = ("", " ", " ", "  ")
    return [
        "".join(draw.choice(WORDS) + draw.choice(joined) for _ in range(draw.randint(1, 12)))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """vocab.json and merges.txt, and a vocab.txt, of a small text of every script."""
    folder = tmp_path_factory.mktemp("trained")
    text = [" ".join(WORDS)] * 3
    pairs = tokenizers.ByteLevelBPETokenizer()
    pairs.train_from_iterator(text, 700, special_tokens=["<|endoftext|>", "<s>", "</s>"])
    pairs.save_model(str(folder))
    pieces = tokenizers.BertWordPieceTokenizer()
    pieces.train_from_iterator(text, 500)
    pieces.save_model(str(folder))
    return folder


def folder_of(path, trained, files, kind, config):
    path.mkdir(exist_ok=True)
    for name in files:
        shutil.copy(trained / name, path / name)
    (path / "config.json").write_text(json.dumps({"model_type": kind}))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


BPE, PIECES = ("vocab.json", "merges.txt"), ("vocab.txt",)
FLAGS = {"lstrip": False, "normalized": False, "single_word": False, "special": False}
THINK = {"content": "<think>", "rstrip": True, **FLAGS}
FOLDERS = {
    "gpt2": (BPE, "gpt2", None),
    "gpt2 by name": (BPE, "llama", {"tokenizer_class": "GPT2Tokenizer", "chat_template": "{{ messages }}"}),
    "qwen2": (BPE, "qwen2", {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"700": THINK}}),
    "roberta": (BPE, "roberta", None),
    "whisper": (BPE, "whisper", None),
    "bert": (PIECES, "bert", {"do_lower_case": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_older_files_are_read_as_transformers_reads_them(tmp_path, trained, name):
    folder = folder_of(tmp_path, trained, *FOLDERS[name])
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    source = open_source(folder)
    assert source.has_tokenizer
    assert source.no_tokenizer is None
    ours = source.tokenizer
    for text in [*texts(400), "a<think> b"]:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert len(ours.vocabulary) == len(theirs)
    assert ours.config.templates.get("default") == theirs.chat_template
    assert read_tokenizer(folder).vocabulary == ours.vocabulary


@pytest.mark.parametrize(
    ("files", "kind", "words"),
    [
        # earlier versions make a tokenizer of them that lacks most tokens, later ones none
        (BPE, "llama", r"merges.txt, vocab.json, (which \w+ reads without|of which .* no tokenizer) .*tokenizer_class"),
        ((), "llama", r"but tokenizer.model, .*pip install sentencepiece protobuf, or give tokenizer="),
        (("vocab.json",), "wav2vec2", r"vocab.json, which \w+ reads without a form as tokenizer.json: give"),
    ],
)  # fmt: skip
def test_what_no_tokenizer_comes_of_is_said(tmp_path, trained, files, kind, words, monkeypatch):
    monkeypatch.setattr("accel.compiler.load.converted.find_spec", lambda name: None)
    config = {"tokenizer_class": "Wav2Vec2CTCTokenizer"} if kind == "wav2vec2" else None
    folder = folder_of(tmp_path, trained, files, kind, config)
    if not files:
        (folder / "tokenizer.model").write_bytes(b"\x0a\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    source = open_source(folder)
    assert source.tokenizer is None
    assert not source.has_tokenizer
    with pytest.raises(CaptureError, match=words) as refused:
        read_tokenizer(folder)
    assert source.no_tokenizer == str(refused.value)
    assert "\n" not in source.no_tokenizer


def test_a_build_takes_it_or_says_why_not(tmp_path, trained):
    model = models.random(
        "llama", vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    for name in BPE:
        shutil.copy(trained / name, tmp_path / name)
    options = {"max_context": 32, "verify": False, "target": "eager"}
    with accel.optimize(tmp_path, **options) as built:
        assert any("tokenizer_class" in note for note in built.report["notes"])
        assert built.tokenizer is None
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with accel.optimize(tmp_path, **options) as built:
        assert not any("tokenizer_class" in note for note in built.report["notes"])
        want = converted(tmp_path)("Привет мир").input_ids
        assert built.tokenizer.encode("Привет мир") == want
        assert built.generate("Привет мир", max_new_tokens=2).tokens[0]
