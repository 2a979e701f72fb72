"""Streaming text equals the whole decode for every kind of tokenizer, and stop strings are found
across tokens.
"""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from accel.ir.errors import ArtifactError, InputError
from accel.runtime.inputs.text import StopMatcher, StreamDecoder, Tokenizer

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "the quick brown fox jumps over the lazy dog",
    "naïve café — 你好, мир! 🙂🙃 ½",
] * 3


def byte_level():
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tok.add_tokens([AddedToken("«added é»", special=False)])
    return tok


def llama():
    """SentencePiece as Llama has it: ▁ for space, bytes where the vocabulary lacks a character."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    tok = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tok.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *bytes_],
        limit_alphabet=60,
        show_progress=False,
    )
    tok.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    state = json.loads(tok.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # byte tokens are ordinary ones, as in Llama
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def metaspace():
    tok = tokenizers.Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def word_piece():
    tok = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=["[UNK]"], show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


KINDS = {f.__name__: f for f in (byte_level, llama, metaspace, word_piece)}


@pytest.fixture(scope="module")
def kinds():
    return {name: Tokenizer(make().to_str().encode()) for name, make in KINDS.items()}


def streamed(tokenizer, tokens, make=None):
    stream = make(tokenizer) if make else tokenizer.stream()
    return [*(stream.push(t) for t in tokens), stream.finish()]


def law_stream_is_decode(tokenizer, tokens, make=None):
    pieces = streamed(tokenizer, tokens, make)
    assert "".join(pieces) == tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_as_they_decode(kinds, kind, data):
    """Any ids: unfinished and impossible bytes, special tokens, numbers beyond the vocabulary."""
    tokenizer = kinds[kind]
    size = tokenizer._inner.get_vocab_size() + 3
    any_token = st.integers(0, size) | st.integers(0, min(size, 270))
    law_stream_is_decode(tokenizer, data.draw(st.lists(any_token, max_size=40)))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=40) | st.text("aé你🙂 ▁\n", max_size=30))
def test_text_streams_whole_characters(kinds, kind, text):
    tokenizer = kinds[kind]
    tokens = tokenizer.encode(text)
    law_stream_is_decode(tokenizer, tokens)
    if "�" not in tokenizer.decode(tokens):
        assert not any("�" in piece for piece in streamed(tokenizer, tokens))
    if kind == "byte_level" and "<eos>" not in text:
        assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_behind_any_prompt(kinds, kind, data):
    tokenizer = kinds[kind]
    size = tokenizer._inner.get_vocab_size() + 3
    some = st.lists(st.integers(0, size) | st.integers(0, min(size, 270)), max_size=12)
    prompt, tokens = data.draw(some), data.draw(some)
    stream = tokenizer.stream(prompt)
    pieces = [*(stream.push(t) for t in tokens), stream.finish()]
    assert "".join(pieces) == tokenizer.decode_behind(prompt, tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", CORPUS[:3])
def test_a_text_goes_on_from_its_prompt(kinds, kind, text):
    """Wherever it is cut between characters, with the space before its first word."""
    tokenizer, spaces = kinds[kind], 0
    tokens = tokenizer.encode(text, special=False)
    whole = tokenizer.decode(tokens)
    for at in range(1, len(tokens)):
        prompt, rest = tokens[:at], tokens[at:]
        if whole.startswith(tokenizer.decode(prompt)):
            found = tokenizer.decode_behind(prompt, rest)
            assert tokenizer.decode(prompt) + found == whole
            spaces += found.startswith(" ")
    assert spaces > 2 and tokenizer.decode_behind([], tokens) == whole


class OneByOne(StreamDecoder):
    """The broken way: each token decoded alone."""

    def push(self, token):
        return self._tokenizer.decode([token])

    def finish(self):
        return ""


@pytest.mark.parametrize(
    "kind, text", [("byte_level", "🙂"), ("llama", "the dog"), ("metaspace", "the dog")]
)
def test_the_law_catches_one_by_one(kinds, kind, text):
    with pytest.raises(AssertionError):
        law_stream_is_decode(kinds[kind], kinds[kind].encode(text), OneByOne)


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_text_comes_early(kinds, kind):
    """Not only exact but prompt: nothing is held back without need."""
    tokenizer = kinds[kind]
    tokens, text, stream = tokenizer.encode("the quick brown fox"), "", tokenizer.stream()
    for i, token in enumerate(tokens):
        text += stream.push(token)
        assert text == tokenizer.decode(tokens[: i + 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", CORPUS[:3])
def test_bytes_of_tokens_are_the_text(kinds, kind, text):
    """With the spaces that some decoders drop at the beginning of a text, and a token alone is one."""
    tokenizer = kinds[kind]
    tokens = tokenizer.encode(text, special=False)
    joined = b"".join(tokenizer.token_bytes(token) or b"" for token in tokens).decode()
    assert joined.lstrip(" ") == tokenizer.decode(tokens).lstrip(" ") and " " in joined[1:]


def test_both_decoders_agree_on_bytes(kinds):
    """The general decoder on a byte-level tokenizer: characters of many tokens wait."""
    tokens = kinds["byte_level"].encode("a🙂b你c🙂")
    law_stream_is_decode(kinds["byte_level"], tokens, StreamDecoder)


@pytest.mark.parametrize("kind, make", [(k, None) for k in KINDS] + [("byte_level", StreamDecoder)])
def test_cost_is_linear(kinds, kind, make, monkeypatch):
    """Tokens decoded in all, counted: a few for each one that comes, and each once at the end."""
    work, plain = [], Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, t: (work.append(len(t)), plain(self, t))[1]
    )
    tokens = kinds[kind].encode("the quick brown fox jumps 🙂 " * 200)
    streamed(kinds[kind], tokens, make)
    assert len(tokens) > 500 and sum(work) < 30 * len(tokens)


def test_padding_and_truncation_in_the_file_are_off():
    tok = byte_level()
    tok.enable_truncation(2)
    tok.enable_padding(length=50)
    assert len(Tokenizer(tok.to_str().encode()).encode("the quick brown fox jumps")) not in (2, 50)


def test_a_file_that_is_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in ("tokenizer.json", "missing.json"):
        with pytest.raises(ArtifactError, match=name):
            Tokenizer(tmp_path / name)
    with pytest.raises(ArtifactError, match="the tokenizer is not"):
        Tokenizer(b"\xff")


def matched(stops, pieces):
    """(text passed on, pieces taken until it stopped)."""
    matcher, out = StopMatcher(stops), ""
    for i, piece in enumerate(pieces):
        text, stopped = matcher.push(piece)
        out += text
        if stopped:
            return out, i + 1
    return out + matcher.finish()[0], len(pieces)


def law_stop_is_find(stops, pieces, match=matched):
    whole = "".join(pieces)
    places = [whole.find(s) for s in stops if s in whole]
    assert match(stops, pieces)[0] == whole[: min(places, default=len(whole))]


texts = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(texts, min_size=1, max_size=3),
    pieces=st.lists(st.text("ab c", max_size=3), max_size=12),
)
def test_stops_are_found_however_the_text_is_cut(stops, pieces):
    law_stop_is_find(stops, pieces)


def test_the_stop_law_catches_matching_piece_by_piece():
    def by_piece(stops, pieces):
        out = ""
        for piece in pieces:
            for stop in stops:
                if stop in piece:
                    return out + piece[: piece.find(stop)], 0
            out += piece
        return out, 0

    law_stop_is_find(["ab"], ["xaby"], by_piece)
    with pytest.raises(AssertionError):
        law_stop_is_find(["ab"], ["xa", "by"], by_piece)


def test_only_what_may_become_a_stop_is_held():
    matcher = StopMatcher(["\n\n", "END"])
    assert matcher.push("a\n") == ("a", False)
    assert matcher.push("b E") == ("\nb ", False)
    assert matcher.push("Nx") == ("ENx", False)
    assert matcher.push("\n\n more") == ("", True)
    assert matcher.push("x") == ("", True) and matcher.finish() == ("", True)
    assert matched(["abc", "b"], ["a", "b", "x"]) == ("a", 3), (
        "a longer stop may begin earlier: wait"
    )
    assert matched(["abc", "b"], ["a", "b", "c"]) == ("", 3)
    for bad in ([""], [3]):
        with pytest.raises(InputError):
            StopMatcher(bad)
