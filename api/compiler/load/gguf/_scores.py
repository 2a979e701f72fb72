"""SentencePiece's BPE: of two neighbours those are joined first whose piece has the highest score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNKNOWN, CONTROL, OWN, BYTE = 2, 3, 4, 6  # types of a piece; 1 is a plain one
SPACE = "▁"


def by_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], prefix: bool
) -> Any:
    """A `tokenizers.Tokenizer` of pieces with types and scores. prefix: a space is put before a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    joined = [i for i, kind in enumerate(types) if kind not in (UNKNOWN, CONTROL, BYTE)]
    joined.sort(key=lambda i: -scores[i])
    merges = [
        (token[:at], token[at:])
        for token in map(tokens.__getitem__, joined)
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == UNKNOWN), None)
    falls = BYTE in types
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=falls)
    )
    spaces = normalizers.Replace(" ", SPACE)
    before = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, spaces])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
