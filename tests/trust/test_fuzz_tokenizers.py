"""tokenizer.json files with damage: each is read, or refused with an AccelError; no panic of the library is bare, and
nothing hangs. In a process of its own, which a panic or an endless loop may take with it.
"""

import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

FEW, MANY = 150, 10_000
SECONDS = 10
CORPUS = ["ab ba abba cab", "Héllo, wörld! 12 345", "日本語 🙂 text\n\tdef f(x):"]
TEXTS = [
    "",
    "ab ba",
    "Héllo 🙂 日本",
    "\0\u200b\ufeff",
    "x" * 300,
    "<s> ab </s>",
    " " * 50,
    "1 2\n3\r\n4",
]
VALUES = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**64,
    1e300,
    "",
    "a",
    "\u2581",
    "x" * 1000,
    [],
    {},
    [["a", "b"]],
    "(a+)+$",
    "[",
]


def plain():
    """Small tokenizers of the kinds that models have."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    split = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    split.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "\u2581")])
    split.pre_tokenizer = pre_tokenizers.Split(
        tokenizers.Regex(r"\u2581?[a-z]+|\d{1,3}|\s+"), "isolated"
    )
    split.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    split.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
        ),
    )
    split.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    unigram = tokenizers.Tokenizer(models.Unigram())
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    unigram.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    words = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    words.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]"], show_progress=False),
    )
    return [t.to_str().encode() for t in (bpe, split, unigram, words)]


def mutant(seed, sources):
    """Bytes that differ from a tokenizer.json: a value, a key or bytes of it."""
    rng = random.Random(seed)
    source = rng.choice(sources)
    if rng.random() < 0.3:
        data = bytearray(source)
        for _ in range(rng.choice([1, 2, 8, 64])):
            at = rng.randrange(len(data))
            data[at : at + rng.choice([0, 1, 1, 20])] = rng.choice(
                [b"", bytes([rng.randrange(256)]), b'"', b"[", b"9" * 30]
            )
        return bytes(data)
    value = json.loads(source)
    for _ in range(rng.choice([1, 1, 2, 4])):
        holder, key = value, rng.choice(list(value))
        while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.8:
            holder = holder[key]
            key = (
                rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
            )
        if rng.random() < 0.2 and isinstance(holder, dict):
            del holder[key]
        elif isinstance(holder[key], (int, float)) and rng.random() < 0.5:
            holder[key] = holder[key] + rng.choice([1, -1, 1000, 0.5])
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        if not value:
            break
    return json.dumps(value).encode()


def use(data):
    """All that accel asks of a tokenizer. Whether it was taken."""
    from accel.ir.errors import AccelError
    from accel.runtime.inputs.text import Tokenizer

    try:
        tokenizer = Tokenizer(data)
        for text in TEXTS:
            ids = tokenizer.encode(text)
            tokenizer.decode(ids)
            stream = tokenizer.stream()
            for token in [*ids, 0, 299, 10**6]:
                stream.push(token)
            stream.finish()
        len(tokenizer.vocabulary)
    except AccelError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 1500, str(error)[:200]
        return False
    return True


def main(folder, first, last):
    """Cases first..last-1. The file `at` says which one runs."""
    at = Path(folder) / "at"
    sources = [file.read_bytes() for file in sorted(Path(folder).glob("*.json"))]
    taken = 0
    for seed in range(int(first), int(last)):
        at.write_text(str(seed))
        taken += use(mutant(seed, sources))
    at.write_text(f"taken {taken}")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("first", "last"),
    [(0, FEW), pytest.param(FEW, MANY, marks=pytest.mark.long)],
    ids=["few", "many"],
)
def test_tokenizers(tmp_path, first, last):
    for i, data in enumerate(plain()):
        (tmp_path / f"{i}.json").write_bytes(data)
        assert use(data), "as it is"
    command = [sys.executable, __file__, tmp_path, str(first), str(last)]
    limit = SECONDS + 10 + (last - first) // 20
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail(f"hangs at {(tmp_path / 'at').read_text()}")
    at = (tmp_path / "at").read_text()
    assert done.returncode == 0, f"seed {at}: {done.stderr[-2000:]}"
    assert int(at.removeprefix("taken ")) > (last - first) // 30, "some changes do no harm"


def test_the_fuzzer_sees_an_error_of_another_kind(monkeypatch):
    """The control: a panic, which is no Exception, and a text that fails bare."""
    from accel.runtime.inputs.text import Tokenizer

    for broken in (KeyError("bare"), type("PanicException", (BaseException,), {})("panic")):

        def fail(*_, _broken=broken, **__):
            raise _broken

        monkeypatch.setattr(Tokenizer, "decode", fail)
        with pytest.raises(type(broken)):
            use(plain()[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
