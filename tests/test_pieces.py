"""SentencePiece's BPE files, read without its package: text is split by their rule, and as SentencePiece splits it."""

import io
import json
import struct

import pytest

from accel.compiler.load.tokenizer import read_tokenizer
from accel.ir.errors import CaptureError

from .test_older_tokenizers import WORDS, texts

COUNTS = [300, pytest.param(10_000, marks=pytest.mark.long)]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]


def field(number, value):
    """One of a message of Protocol Buffers."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value):
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def written(folder, words, prefix=True, extra=False):
    """A file of pieces of the given words and their letters; the first word has the highest score."""
    plain = [*words, *sorted({letter for word in words for letter in word} - {*words})]
    named = [*((t, 0.0, 2 if t == "<unk>" else 3) for t in SPECIAL), *((t, 0.0, 6) for t in BYTES)]
    named += [(word, -float(i), 1) for i, word in enumerate(plain)]
    data = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + field(3, kind))
        for text, score, kind in named
    )
    data += field(2, field(3, 2) + field(35, 1))
    data += field(3, field(1, b"identity") + field(3, int(prefix)) + field(4, int(extra)))
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(data)
    return {text: i for i, (text, *_) in enumerate(named)}


def merged(count=200):
    """Pieces that grow by pairs, as training finds them: the frequent first."""
    found = []
    for word in WORDS[:44]:
        for size in range(2, len(word) + 1):
            found.append("▁" * (size % 2) + word[:size].replace(" ", "▁"))
    return [word for word in dict.fromkeys(["▁▁", *found]) if "<" not in word][:count]


def by_rule(text, held, prefix):
    """Of two neighbours those are joined first that stand first in the file; bytes of what has no piece."""
    pieces = list((("▁" if prefix and text else "") + text).replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in zip(pieces, pieces[1:], strict=False)]
        known = [i for i, pair in enumerate(pairs) if pair in held]
        if not known:
            break
        at = min(known, key=lambda i: held[pairs[i]])
        pieces[at : at + 2] = [pairs[at]]
    found = []
    for piece in pieces:
        one = held.get(piece)
        found += [3 + byte for byte in piece.encode()] if one is None else [one]
    return found


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_joined_by_their_rule(prefix, count, tmp_path):
    held = written(tmp_path, merged(), prefix)
    ours = read_tokenizer(tmp_path)
    for text in texts(count):
        plain = text.replace("<s>", "").replace("</s>", "")
        wanted = by_rule(plain, held, prefix)
        assert ours.encode(plain, special=False) == wanted, plain
        assert ours.encode(plain) == [1, *wanted]
        assert ours.decode(wanted) == plain.replace("▁", " ")
    assert ours.encode("</s>", special=False) == [2]
    assert ours.config.special == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def test_the_configuration_says_what_stands_around_a_text(tmp_path):
    held = written(tmp_path, merged(), extra=True)
    told = {"add_bos_token": False, "add_eos_token": True, "chat_template": "{{ messages }}"}
    told["added_tokens_decoder"] = {str(len(held)): {"content": "<|im_start|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    ours = read_tokenizer(tmp_path)
    assert ours.encode("  he   he ") == [*by_rule("he he", held, True), 2]  # spaces are removed
    assert ours.encode("<|im_start|>", special=False) == [len(held)]
    assert ours.config.templates == {"default": "{{ messages }}"}


@pytest.mark.parametrize("cut", [2, 40, 4000])
def test_a_cut_file_is_refused(cut, tmp_path):
    written(tmp_path, merged())
    file = tmp_path / "tokenizer.model"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(
        CaptureError, match=r"tokenizer.model cannot be read \(.*\): fetch it again"
    ):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("extra", [True, False])
def test_pieces_are_sentencepieces(extra, count, tmp_path):
    package = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS[:44])] * 20 + texts(300)), model_writer=out, vocab_size=900,
        model_type="bpe", byte_fallback=True, character_coverage=0.98, hard_vocab_limit=False,
        normalization_rule_name="identity", remove_extra_whitespaces=extra, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(out.getvalue())
    ours = read_tokenizer(tmp_path)
    theirs = package.SentencePieceProcessor(model_proto=out.getvalue())
    for text in texts(count):
        plain = text.replace("<s>", "").replace("</s>", "").replace("\x00", "")
        assert ours.encode(plain, special=False) == theirs.encode(plain), plain
