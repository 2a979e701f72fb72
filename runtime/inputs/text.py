"""Text <-> tokens over a `tokenizer.json`, text that streams, and stop strings that span tokens."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers

from accel.ir.errors import AccelError, ArtifactError, InputError, shown
from accel.runtime.inputs.tokenizer_config import TokenizerConfig

_VERSION = tokenizers.__version__
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_ANCHOR = (
    4  # tokens decoded again to the left of new ones, for decoders that look at the token before
)
ALIKE = 0.99  # of the tokens of the smaller vocabulary, where two tokenizers are taken for one
_HELD = 8  # tokens held at most while a character seems unfinished: none has more bytes


@contextmanager
def _told(kind: type[AccelError], what: str) -> Iterator[None]:
    """What the library raises, as an error of that kind: plain Exceptions, and panics, which are none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}; give the tokenizer.json that belongs to the model") from error


class Tokenizer:
    """A `tokenizers.Tokenizer` with padding and truncation off. Thread-safe."""

    def __init__(
        self, source: str | os.PathLike[str] | bytes, config: TokenizerConfig | None = None
    ):
        """`source`: the path of a tokenizer.json, or its content as bytes; `config`: its special tokens and chat
        templates. Raises ArtifactError.
        """
        self.config = config or TokenizerConfig()
        name = "the tokenizer" if isinstance(source, bytes) else str(source)
        with _told(
            ArtifactError, f"{name} is not a tokenizer.json that tokenizers {_VERSION} reads"
        ):
            self._json = source if isinstance(source, bytes) else Path(source).read_bytes()
            self._inner = tokenizers.Tokenizer.from_str(self._json.decode("utf-8"))
        self._inner.no_padding()
        self._inner.no_truncation()
        self._inner.encode_special_tokens = self.config.splits_special
        self.special = frozenset(
            i for i, token in self._inner.get_added_tokens_decoder().items() if token.special
        )
        self.added: dict[str, int] = {
            token.content: i for i, token in self._inner.get_added_tokens_decoder().items()
        }
        part = self._inner.decoder
        decoder = None if part is None else json.loads(part.__getstate__())
        parts = (decoder or {}).get("decoders", [decoder])
        kinds = [(part or {}).get("type") for part in parts]
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds

    @property
    def json(self) -> bytes:
        """The content of its tokenizer.json."""
        return self._json

    @property
    def settled_json(self) -> str:
        """Its tokenizer.json with padding and truncation off."""
        text: str = self._inner.to_str()
        return text

    @staticmethod
    def _check(text: str) -> None:
        """Raises InputError."""
        surrogates = (i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff")
        if (place := next(surrogates, None)) is not None:
            raise InputError(
                f"the text holds a lone surrogate (U+{ord(text[place]):04X}) at place {place}, which no UTF-8 text "
                "does; decode its bytes as UTF-8, with errors='replace' where they may be wrong"
            )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the model expects around a text (a first token)."""
        self._check(text)
        with _told(InputError, "the model's tokenizer cannot encode this text"):
            ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The token ids [n] of two texts as the model takes them together, and the type of each, 0 or 1."""
        for text in (first, second):
            self._check(text)
        with _told(InputError, "the model's tokenizer cannot encode these texts"):
            found = self._inner.encode(first, second)
        return found.ids, found.type_ids

    @overload
    def apply_chat_template(
        self, messages: Any, tools: Any = None, *, tokenize: Literal[True] = True, **more: Any
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self, messages: Any, tools: Any = None, *, tokenize: Literal[False], **more: Any
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """The token ids of a conversation as a prompt, as transformers gives them.

        Args:
            messages: a dict for each message: "role", "content" and what else the template reads.
            tools: JSON schemas of functions that the model may call.
            tokenize: False gives the text.
            documents: dicts with "title" and "text".
            add_generation_prompt: end with the beginning of the assistant's answer.
            chat_template: the name of one of the model's templates, or a Jinja template. Default: its "tool_use"
                with tools, if it has one; else the plain one.
            variables: what else the template reads, such as `enable_thinking`.

        Raises:
            InputError: there is no template, or it refuses these messages.
            ArtifactError: the model's template is no Jinja, or was stopped.
        """
        from accel.runtime.inputs.chat import render

        text = render(
            self.config,
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            **variables,
        )
        return self.encode(text, special=False) if tokenize else text

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens; `special`: as the vocabulary writes the special ones, which are left out else."""
        ids = [int(t) for t in tokens]
        with _told(InputError, "the model's tokenizer cannot decode these tokens"):
            text: str = self._inner.decode(ids, skip_special_tokens=not special)
        return text

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added ones too."""
        found: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return found

    @property
    def digest(self) -> str:
        """sha256 of the vocabulary."""
        told = json.dumps(sorted(self.vocabulary.items()))
        return hashlib.sha256(told.encode()).hexdigest()

    def token(self, index: int) -> str | None:
        """How the vocabulary writes a token; None for a number that it lacks."""
        found: str | None = self._inner.id_to_token(index)
        return found

    def index(self, token: str) -> int | None:
        """The number of a token as the vocabulary writes it, added ones too; None for one that it lacks."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def token_bytes(self, index: int) -> bytes | None:
        """What a token adds to a text that has begun, as bytes, which need not be whole characters; None for one that
        is left out of texts (special, or a number that the vocabulary lacks).
        """
        written = self.token(index)
        if written is None or index in self.special:
            return None
        if self.byte_level:
            try:
                return bytes(_BYTE_OF[c] for c in written)
            except KeyError:  # an added token, written as itself
                return written.encode("utf-8")
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(written):
            return bytes([int(written[3:5], 16)])
        once, twice = self.decode([index]), self.decode([index, index])
        # a decoder may drop the space before the first word of a text
        return (twice.removeprefix(once) if twice.startswith(once) else once).encode("utf-8")

    def stream(self, prompt: Sequence[int] = ()) -> StreamDecoder:
        """A decoder that takes tokens one by one, of a text that goes on from a prompt's tokens."""
        return _ByteStream(self) if self.byte_level else StreamDecoder(self, self.end_of(prompt))

    def end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, as many as say how the text behind them is decoded: decoders of SentencePiece
        drop the space before the first word of a text, and what follows a prompt is not the first.
        """
        return list(islice((int(t) for t in reversed(prompt) if t not in self.special), _ANCHOR))[
            ::-1
        ]

    def decode_behind(self, prompt: Sequence[int], tokens: Iterable[int]) -> str:
        """The text that tokens add to a prompt's, special ones left out; where bytes of both would make other
        characters together, that of the tokens alone.
        """
        end, ids = [] if self.byte_level else self.end_of(prompt), list(tokens)
        before, whole = self.decode(end), self.decode([*end, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.decode(ids)


class StreamDecoder:
    """Text as tokens come: all pieces and `finish()` together equal `decode_behind` of all tokens.

    No piece splits a character. Each token costs a decode of a few, whatever came before. Works for
    any decoder in which text goes on from the last few tokens; a run of byte tokens is held until
    it ends, because one bad byte changes how the whole run reads.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        """`before`: the last tokens of the text that this one goes on from, see `Tokenizer.end_of`."""
        self._tokenizer = tokenizer
        self._before = list(before)
        self._all: list[int] = []
        self._anchor = list(before)
        self._held: list[int] = []
        self._emitted: list[str] = []

    def push(self, token: int) -> str:
        """The text that has become certain with this token; often "" ."""
        self._all.append(token)
        written = self._tokenizer.token(token)
        if written is None or token in self._tokenizer.special:
            return ""
        self._held.append(token)
        if self._tokenizer.byte_fallback and _BYTE_TOKEN.fullmatch(written):
            return ""
        before = self._tokenizer.decode(self._anchor)
        after = self._tokenizer.decode([*self._anchor, *self._held])
        if not self._emitted and not after.startswith(before):  # as in `decode_behind`
            self._anchor, before, after = [], "", self._tokenizer.decode(self._held)
        unfinished = after.endswith("�") and len(self._held) < _HELD
        if unfinished or not after.startswith(before):
            return ""
        self._anchor = [*self._anchor, *self._held][-_ANCHOR:]
        self._held = []
        piece = after[len(before) :]
        self._emitted.append(piece)
        return piece

    def branch(self) -> StreamDecoder:
        """Another that goes on from here by itself."""
        other = copy(self)
        other._all, other._anchor, other._held = (
            list(self._all),
            list(self._anchor),
            list(self._held),
        )
        other._emitted = list(self._emitted)
        return other

    def finish(self) -> str:
        """What was held back; an unfinished character reads as U+FFFD."""
        whole = self._tokenizer.decode_behind(self._before, self._all)
        emitted = "".join(self._emitted)
        piece = whole[len(emitted) :] if whole.startswith(emitted) else ""
        self._emitted.append(piece)
        self._held = []
        return piece


class _ByteStream(StreamDecoder):
    """Byte-level BPE: each token is bytes, so the text is their UTF-8, decoded as it comes."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token) or b"")

    def branch(self) -> StreamDecoder:
        other = copy(self)
        other._utf8 = copy(self._utf8)
        return other

    def finish(self) -> str:
        piece = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return piece


class StopMatcher:
    """Text up to the first stop string, wherever pieces are cut.

    `push` gives the text that cannot be part of a stop string any more, and whether one was found;
    from then on it gives nothing. Where a longer stop that began earlier may still come, it waits
    for it.
    """

    def __init__(self, stops: Sequence[str]):
        """Raises InputError for an empty stop string."""
        if any(not isinstance(s, str) or not s for s in stops):
            raise InputError(f"stop = {shown(list(stops))}: give non-empty strings")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._buffer = ""
        self.stopped = False
        self.reason: str | None = None  # the stop string that was reached

    def push(self, text: str) -> tuple[str, bool]:
        """(text to pass on, whether a stop string was reached)."""
        if self.stopped:
            return "", True
        self._buffer += text
        found = self._find()
        may_begin = self._partial(len(self._buffer) if found is None else found)
        if found is not None and may_begin == found:
            self._stop(found)
        out, self._buffer = self._buffer[:may_begin], self._buffer[may_begin:]
        if self.stopped:
            self._buffer = ""
        return out, self.stopped

    def finish(self) -> tuple[str, bool]:
        """The rest, now that no more text comes, and whether a stop string was in it."""
        found = self._find() if not self.stopped else None
        if found is not None:
            self._stop(found)
        out, self._buffer = self._buffer[:found], ""
        return out, self.stopped

    def _stop(self, place: int) -> None:
        self.stopped = True
        self.reason = next(s for s in self._stops if self._buffer.startswith(s, place))

    def _find(self) -> int | None:
        """Where the earliest whole stop string begins."""
        places = [i for i in map(self._buffer.find, self._stops) if i >= 0]
        return min(places, default=None)

    def _partial(self, end: int) -> int:
        """The first place before `end` from which the rest of the buffer may still become a stop
        string.
        """
        for i in range(max(0, len(self._buffer) - self._longest + 1), end):
            if any(s.startswith(self._buffer[i:]) for s in self._stops):
                return i
        return end


def _byte_table() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others are shifted to 256
    and up.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return {chr(b if b in printable else next(shifted)): b for b in range(256)}


_BYTE_OF: dict[str, Any] = _byte_table()


@lru_cache(maxsize=8)
def same_tokens(tokenizer: Tokenizer | None, other: Tokenizer | None) -> bool:
    """Whether an id means the same token in both; where one of them has no tokenizer, it is taken to."""
    if tokenizer is None or other is None:
        return True
    small, large = sorted((tokenizer.vocabulary, other.vocabulary), key=len)
    return sum(large.get(token) == number for token, number in small.items()) >= ALIKE * len(small)
