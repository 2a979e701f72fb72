"""SentencePiece's BPE, as tokenizer.json: of two neighbours those are joined first whose piece has the highest score.
Its file is one message of Protocol Buffers, whose few fields that count are read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel.compiler.load.gguf._scores import CONTROL, OWN, UNKNOWN, by_scores
from accel.ir.errors import CaptureError

_BPE = 2  # of model_type
_FIELDS = {
    "unk": 40,
    "bos": 41,
    "eos": 42,
    "pad": 43,
}  # of the trainer: the numbers of special pieces
_USUAL = {"unk": 0, "bos": 1, "eos": 2, "pad": -1}


def pieces(folder: Path, config: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The text of a tokenizer.json of a folder's SentencePiece file, and its special tokens as tokenizer_config.json
    would name them; None where it has none of BPE without a table of normal forms. config: tokenizer_config.json.

    Raises CaptureError: the file is damaged.
    """
    for file in sorted(folder.glob("*.model")):
        data = file.read_bytes() if file.is_file() else b""
        if data[:1] != b"\n":  # the first piece
            continue
        try:
            return _converted(data, config)
        except (ValueError, IndexError, struct.error) as error:
            raise CaptureError(
                f"{file} cannot be read ({type(error).__name__}: {error}): fetch it again"
            ) from error
    return None


def _converted(data: bytes, config: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    from tokenizers import AddedToken, Regex, normalizers, processors

    tokens, types, scores = list[str](), list[int](), list[float]()
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _message(data):
        if field == 1:
            piece = dict(_message(value))
            tokens.append(str(piece[1], "utf-8"))
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            types.append(piece.get(3, 1))
        elif field in (2, 3):
            (trainer if field == 2 else normalizer).update(_message(value))
    if trainer.get(3, 1) != _BPE or not tokens or normalizer.get(2):
        return None
    tokenizer = by_scores(tokens, types, scores, bool(normalizer.get(3, 1)))
    if normalizer.get(4, 1):
        ends, many = Regex(r"\A +| +\z"), Regex(" {2,}")
        steps = [normalizers.Replace(ends, ""), normalizers.Replace(many, " ")]
        tokenizer.normalizer = normalizers.Sequence([*steps, tokenizer.normalizer])
    kinds = {CONTROL: True, UNKNOWN: True, OWN: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kinds[kind])
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds
        ]
    )
    named = {key: _signed(trainer.get(field, _USUAL[key])) for key, field in _FIELDS.items()}
    special = {key: tokens[i] for key, i in named.items() if i >= 0}
    around = {"bos": config.get("add_bos_token", True), "eos": config.get("add_eos_token", False)}
    put = {key: special[key] for key, wanted in around.items() if wanted and key in special}
    if put:
        begin, end = ([put[key]] if key in put else [] for key in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, *begin, "$B", *end],
            special_tokens=[(token, tokens.index(token)) for token in put.values()],
        )
    return str(tokenizer.to_str()), {f"{key}_token": token for key, token in special.items()}


def _message(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers, or bytes of what is none. Raises ValueError where it ends early."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _number(data, at)
            yield field, value
            continue
        if kind == 2:
            size, at = _number(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes, and {len(data) - at} are left")
        yield field, data[at : at + size]
        at += size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of 7 bits, and where it ends."""
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
