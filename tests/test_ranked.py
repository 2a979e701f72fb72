"""Ranked vocabularies (tekken.json, tiktoken's files) split text as their rule says, and as their own libraries do."""

import base64
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import regex
import tokenizers

from accel.compiler.load import ranked
from accel.compiler.load.source import open_source
from accel.compiler.load.tokenizer import read_tokenizer
from accel.ir.errors import CaptureError

from .test_older_tokenizers import WORDS, texts

SPECIAL = 40  # special tokens of the small tekken.json
TEKKEN = ranked._O200K.replace(f"{ranked._ENDINGS}?", "").replace(r"\p{N}{1,3}", r"\p{N}")
COUNTS = [300, pytest.param(10_000, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def ranks():
    """Byte strings by rank, of a small text of every script."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([" ".join(WORDS)] * 3, 700)
    held = trained.get_vocab()
    letters = {letter: byte for byte, letter in enumerate(ranked._letters())}
    return {bytes(letters[c] for c in word): held[word] for word in held}


def tekken(folder, ranks):
    folder.mkdir(exist_ok=True)
    words = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for word, rank in sorted(ranks.items(), key=lambda pair: pair[1])
    ]
    told = {"pattern": TEKKEN, "num_vocab_tokens": len(words), "version": "v3"}
    told |= {"default_vocab_size": len(words) + SPECIAL - 10, "default_num_special_tokens": SPECIAL}
    (folder / "tekken.json").write_text(json.dumps({"config": told, "vocab": words}))
    return folder


def tiktoken(folder, name, ranks):
    folder.mkdir(exist_ok=True)
    lines = [base64.b64encode(word) + b" %d\n" % rank for word, rank in ranks.items()]
    (folder / name).write_bytes(b"".join(lines))
    return folder


def by_rule(text, pattern, ranks):
    """Each part of a text by itself: of two neighbours those are joined first whose string has the lowest rank."""
    found = []
    for part in regex.findall(pattern, text):
        data = part.encode()
        pieces = [data] if data in ranks else [data[i : i + 1] for i in range(len(data))]
        while len(pieces) > 1:
            pairs = [a + b for a, b in zip(pieces, pieces[1:], strict=False)]
            at = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
            if pairs[at] not in ranks:
                break
            pieces[at : at + 2] = [pairs[at]]
        found += [ranks[piece] for piece in pieces]
    return found


@pytest.mark.parametrize("count", COUNTS)
def test_tekken_splits_by_its_rule(count, ranks, tmp_path):
    ours = read_tokenizer(tekken(tmp_path, ranks))
    kept = {word: rank for word, rank in ranks.items() if rank < len(ranks) - 10}
    for text in texts(count):
        plain = text.replace("<s>", "").replace("</s>", "")
        wanted = [SPECIAL + rank for rank in by_rule(plain, TEKKEN, kept)]
        assert ours.encode(plain, special=False) == wanted
        assert ours.encode(plain) == [1, *wanted]
        assert ours.decode(wanted) == plain
    assert len(ours.vocabulary) == len(ranks) + SPECIAL - 10
    assert ours.encode("[INST]</s><SPECIAL_39>", special=False) == [3, 2, 39]
    assert ours.config.special["bos_token"] == "<s>"


FILES = {
    "qwen": ("qwen.tiktoken", ranked._DIGITS1, None, "<|im_start|>", 1),
    "llama": ("tokenizer.model", ranked._DIGITS3, "params.json", "<|eot_id|>", 9),
    "r50k": ("r50k_base.tiktoken", ranked._R50K, None, "<|endoftext|>", 0),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", FILES)
def test_tiktoken_splits_by_its_rule(name, count, ranks, tmp_path):
    file, pattern, beside, special, at = FILES[name]
    if beside:
        (tmp_path / beside).write_text("{}")
    ours = read_tokenizer(tiktoken(tmp_path, file, ranks))
    for text in texts(count):
        plain = text.replace("<|endoftext|>", "")
        wanted = by_rule(plain, pattern, ranks)
        assert ours.encode(plain, special=False) == wanted
        assert ours.decode(wanted) == plain
    assert ours.encode(special, special=False) == [len(ranks) + at]
    begins = [len(ranks)] if name == "llama" else []
    assert ours.encode("a") == [*begins, ranks[b"a"]]


def test_special_tokens_that_the_configuration_lists(ranks, tmp_path):
    folder = tiktoken(tmp_path, "o200k_base.tiktoken", ranks)
    listed = {str(800 + i): {"content": f"<|{i}|>"} for i in range(3)}
    told = {"added_tokens_decoder": listed, "eos_token": "<|1|>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    ours = open_source(folder).tokenizer
    assert ours.encode("<|1|>a", special=False) == [801, ranks[b"a"]]
    assert ours.config.special["eos_token"] == "<|1|>"
    assert ours.config.templates == {"default": "{{ messages }}"}


def _without_a_byte(folder):
    file = folder / "qwen.tiktoken"
    lines = [line for line in file.read_bytes().splitlines(True) if not line.startswith(b"YQ== ")]
    file.write_bytes(b"".join(lines))


def _cut(folder):
    file = folder / "tekken.json"
    file.write_bytes(file.read_bytes()[:-100])


def _line(folder):
    file = folder / "qwen.tiktoken"
    file.write_bytes(file.read_bytes() + b"YQ= x\n")


def _twice(folder):
    file = folder / "qwen.tiktoken"
    file.write_bytes(file.read_bytes() + b"YWFhYWFh 3\n")


def _unknown(folder):
    (folder / "qwen.tiktoken").rename(folder / "mine.tiktoken")


@pytest.mark.parametrize(
    ("make", "damage", "why"),
    [
        ("tekken", _cut, r"tekken.json cannot be read \(JSONDecodeError: .*fetch it again"),
        ("tiktoken", _without_a_byte, r"it lacks the byte 97\): fetch it again"),
        ("tiktoken", _line, r"qwen.tiktoken cannot be read \(line \d+: "),
        ("tiktoken", _twice, "two of its tokens have one number"),
        (
            "tiktoken",
            _unknown,
            "does not say how it splits text: accel knows it by the names qwen, ",
        ),
    ],
)
def test_what_no_tokenizer_comes_of_is_said(make, damage, why, ranks, tmp_path):
    tekken(tmp_path, ranks) if make == "tekken" else tiktoken(tmp_path, "qwen.tiktoken", ranks)
    damage(tmp_path)
    with pytest.raises(CaptureError, match=why):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("count", COUNTS)
def test_tiktoken_is_the_original(count, ranks, tmp_path):
    theirs = pytest.importorskip("tiktoken")
    for name, (file, pattern, beside, *_) in FILES.items():
        folder = tiktoken(tmp_path / name, file, ranks)
        if beside:
            (folder / beside).write_text("{}")
        ours = read_tokenizer(folder)
        encoding = theirs.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        for text in texts(count):
            plain = text.replace("<|endoftext|>", "")
            assert ours.encode(plain, special=False) == encoding.encode(plain), (name, plain)


@pytest.mark.long
def test_tekken_is_mistrals_own():
    """The files that mistral-common ships, with 131072 tokens."""
    common = pytest.importorskip("mistral_common")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    files = sorted((Path(common.__file__).parent / "data").glob("tekken_*.json"))
    assert files
    for file in files:
        ours, theirs = read_tokenizer_of(file), Tekkenizer.from_file(str(file))
        for text in texts(10_000):
            plain = text.replace("<s>", "").replace("</s>", "")
            assert ours.encode(plain) == theirs.encode(plain, bos=True, eos=False), plain


def read_tokenizer_of(file):
    """Of a tekken.json under another name."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder) / "tekken.json")
        return read_tokenizer(folder)
