"""Re-translation: a source that arrives in pieces is translated anew with each, and what was shown may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.encoder import EncoderFacts
from accel.ir.errors import InputError, shown
from accel.ir.facts import Facts
from accel.runtime.inputs.encoder_inputs import encoder_rows
from accel.runtime.inputs.ints import Ints, as_ints
from accel.runtime.inputs.prompts import is_text
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.model.output import Output

Generate = Callable[[Ints], Output]  # the output of one source, token ids [n]


@dataclass(frozen=True)
class Translation:
    """The output of a source as far as it has come.

    Attributes:
        tokens: its token ids, without the end token.
        text: of all of them; None without a tokenizer.
        source: tokens that the encoder was given.
        stays: how many of the first tokens are those of the output before, which stay on a screen.
        erased: how many tokens of the output before are gone.
    """

    tokens: list[int]
    text: str | None
    source: int
    stays: int
    erased: int


class Retranslation:
    """Iterator over the translations of a source that arrives in pieces, one for each piece, as it comes. `stats` is
    available at any time.
    """

    def __init__(
        self,
        pieces: Iterable[Any],
        generate: Generate,
        facts: Facts,
        tokenizer: Tokenizer | None,
        suffix: Sequence[int] = (),
    ):
        """As in `CompiledModel.retranslate`."""
        self._encoder = _encoder(facts)
        self._tokenizer, self._generate = tokenizer, generate
        self._pieces, self._suffix = _pieces(pieces), as_ints(suffix, "suffix")
        if self._suffix.ndim != 1:
            raise InputError(f"suffix is {shown(suffix)}; give a list of token ids")
        self._source: str | list[int] | None = None
        self.translations: list[Translation] = []
        self._calls = 0
        self._seconds = 0.0

    def __iter__(self) -> Iterator[Translation]:
        return self

    def __next__(self) -> Translation:
        try:
            piece = next(self._pieces)
        except StopIteration:
            if not self.translations:
                raise InputError(
                    "there are no pieces; give one or more, text or token ids"
                ) from None
            raise
        source = self._so_far(piece)
        output = self._generate(source)
        tokens = output.tokens[0]
        if output.stats["finish"] == ["eos"]:
            tokens = tokens[:-1]
        before = self.translations[-1].tokens if self.translations else []
        stays = common(before, tokens)
        text = None if output.text is None else output.text[0]
        found = Translation(tokens, text, source.size, stays, len(before) - stays)
        self._calls += output.stats["calls"]
        self._seconds += output.stats["prefill_seconds"] + output.stats["decode_seconds"]
        self.translations.append(found)
        return found

    @property
    def stats(self) -> dict[str, float]:
        """`pieces`, graph `calls` and their `seconds`; `erased` tokens; `normalized_erasure`: erased tokens for each
        token of the newest translation (arXiv:2004.03643); `average_lagging`: by how many tokens of the source the
        output is behind one that keeps pace with it (arXiv:1810.08398), each token counted from when it and all
        before it stayed as they are.
        """
        told, erased = self.translations, sum(one.erased for one in self.translations)
        final = told[-1].tokens if told else []
        return {
            "pieces": len(told),
            "calls": self._calls,
            "seconds": self._seconds,
            "erased": erased,
            "normalized_erasure": erased / max(1, len(final)),
            "average_lagging": average_lagging(settled(told), told[-1].source) if told else 0.0,
        }

    def _so_far(self, piece: Any) -> Ints:
        """The source's tokens [n], with a new piece. Raises InputError."""
        place = f"piece {len(self.translations)}"
        if isinstance(piece, str):
            if not piece or not isinstance(self._source, str | None):
                raise InputError(f"{place} is {_wrong(piece, self._source)}")
            self._source = (self._source or "") + piece
            return self._row(self._source)
        ids = as_ints(piece, place)
        if ids.ndim != 1 or not ids.size or isinstance(self._source, str):
            raise InputError(f"{place} is {_wrong(piece, self._source)}")
        self._source = [*(self._source or ()), *ids.tolist()]
        return self._row([np.array([*self._source, *self._suffix.tolist()])])

    def _row(self, source: Any) -> Ints:
        """One encoder input as the encoder takes it, token ids [n]. Raises InputError."""
        rows = encoder_rows(source, self._encoder, self._tokenizer)
        assert rows is not None  # there is an encoder
        return as_ints(rows[0], "encoder_input")


def _wrong(piece: Any, source: Any) -> str:
    """What is wrong with a piece, and what to do."""
    if len(piece) == 0:
        return "empty; give text, or at least one token id"
    if source is None:
        return f"{shown(piece)}; give text, or token ids [n]"
    kind = "text" if isinstance(source, str) else "token ids"
    return f"{shown(piece)}, but those before are {kind}; give all pieces as {kind}"


def _encoder(facts: Facts) -> EncoderFacts:
    """What the encoder takes. Raises InputError where no source can arrive in pieces."""
    if facts.encoder is None:
        raise InputError(
            f"{facts.name} has no encoder: its prompt grows by itself, as a session does; use model.session, or give "
            "an encoder-decoder model"
        )
    if facts.encoder.features:
        raise InputError(
            f"the encoder of {facts.name} takes features of one size, {list(facts.encoder.features)}, and no pieces; "
            "give generate an encoder_input"
        )
    return facts.encoder


def _pieces(pieces: Any) -> Iterator[Any]:
    """Raises InputError."""
    if is_text(pieces) or not isinstance(pieces, Iterable):
        raise InputError(
            f"pieces are {shown(pieces)}; give a list or an iterator of text or token ids"
        )
    return iter(pieces)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many first tokens two texts share."""
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


def settled(translations: Sequence[Translation]) -> list[int]:
    """For each token of the last translation, how much of the source there was when it, and all before it, stayed."""
    found: list[int] = []
    last, limit = translations[-1].tokens, len(translations[-1].tokens)
    for one in reversed(translations):
        limit = min(limit, common(one.tokens, last))
        found[:0] = [] if found else [one.source] * len(last)
        found[:limit] = [one.source] * limit
    return found


def average_lagging(read: Sequence[int], source: int) -> float:
    """AL of a target of whose tokens each was there when so much of a source was `read`."""
    if not read:
        return 0.0
    pace = source / len(read)
    until = next((t for t, one in enumerate(read) if one >= source), len(read) - 1)
    return sum(one - t * pace for t, one in enumerate(read[: until + 1])) / (until + 1)
