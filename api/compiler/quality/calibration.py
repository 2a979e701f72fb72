"""The text that a build calibrates and measures weights on: the user's, accel's own, or random tokens."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.ir.calibration import Calibration
from accel.ir.errors import AccelError, InputError
from accel.ir.facts import Facts
from accel.passes.check import BATCH
from accel.runtime.inputs.text import Tokenizer

ROW = 256  # tokens of a row
_HELD_OUT = 5  # one row of so many is for measuring
_FEWEST = 32  # tokens of a text


def read_calibration(source: Any) -> str | Tensor | None:
    """What `optimize` is given, read: a text file's text, or token ids [n,T] or [tokens].

    Raises:
        InputError: there is no such file, or it is neither.
    """
    if source is None:
        return None
    if isinstance(source, (str, Path)):
        try:
            return Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"calibration: {source} cannot be read as a text file: {error}; give the path of a "
                "UTF-8 text, or token ids"
            ) from error
    try:
        tokens = torch.as_tensor(source)
    except (TypeError, ValueError, RuntimeError):
        tokens = None
    if tokens is None or tokens.dim() not in (1, 2) or tokens.is_floating_point():
        raise InputError(
            f"calibration is a {type(source).__name__}; give the path of a text file, or token ids "
            "[n,T] in rows of equal length"
        )
    return tokens.long()


def make_calibration(
    text_or_ids: str | Tensor | None,
    tokenizer: Tokenizer | None,
    facts: Facts,
    progress: Callable[[str, float], None],
) -> Calibration:
    """Rows to calibrate on and rows of other text to measure on, for a model of these facts.

    Raises:
        InputError: a text without a tokenizer, ids that the vocabulary lacks, or too few of them.
    """
    rows = None
    if isinstance(text_or_ids, Tensor):
        rows = _of_tokens(text_or_ids, facts)
    elif text_or_ids is not None:
        if tokenizer is None:
            raise InputError(
                f"calibration: {facts.name} has no tokenizer for a text; pass "
                "tokenizer=…, or give token ids"
            )
        rows = _of_text(text_or_ids, tokenizer, facts)
    elif tokenizer is not None:
        rows = _bundled(tokenizer, facts)
    if rows is None:
        length = min(ROW, facts.max_context)
        drawn = Calibration.random(facts.vocab_size, length)
        return Calibration(drawn.tokens, drawn.held_out, drawn.source, progress)
    measured = torch.arange(len(rows)) % _HELD_OUT == _HELD_OUT - 1
    measured[-1] = True
    source = "bundled" if text_or_ids is None else "given"
    return Calibration(rows[~measured], rows[measured], source, progress)


def sample(tokenizer: Tokenizer | None, facts: Facts) -> Tensor | None:
    """Token ids [n,T] of accel's own text, of several of its parts, for the numeric check; none without a tokenizer
    of this vocabulary.
    """
    rows = None if tokenizer is None else _bundled(tokenizer, facts)
    return None if rows is None else rows[:: max(1, len(rows) // BATCH)]


def _bundled(tokenizer: Tokenizer, facts: Facts) -> Tensor | None:
    """Accel's own text; nothing where the tokenizer is not of this vocabulary."""
    text = files("accel").joinpath("reference", "calibration.txt").read_text(encoding="utf-8")
    try:
        return _of_text(text, tokenizer, facts)
    except AccelError:
        return None


def _of_text(text: str, reader: Tokenizer, facts: Facts) -> Tensor:
    """Rows [n,T] of a text, each begun as the tokenizer begins a prompt."""
    ids = reader.encode(text, special=False)
    marked, bare = reader.encode("a"), reader.encode("a", special=False)
    first = marked[: marked.index(bare[0])] if bare and bare[0] in marked else []
    return _rows(torch.tensor(ids, dtype=torch.int64), first, facts)


def _of_tokens(tokens: Tensor, facts: Facts) -> Tensor:
    """Rows as they are given, unless there is one only, or they are too long."""
    _check_ids(tokens, facts)
    if tokens.dim() == 2 and len(tokens) > 1 and 1 < tokens.shape[1] <= facts.max_context:
        return tokens
    return _rows(tokens.flatten(), [], facts)


def _rows(ids: Tensor, first: list[int], facts: Facts) -> Tensor:
    """A stream of ids as rows [n,T] with n > 1, each after the tokens that begin a prompt."""
    if len(ids) < _FEWEST:
        raise InputError(f"calibration has {len(ids)} tokens; give at least {_FEWEST}")
    _check_ids(ids, facts)
    room = max(1, min(ROW, facts.max_context) - len(first))
    length = min(room, max(1, len(ids) // 8))
    rows = ids[: len(ids) // length * length].view(-1, length)
    begin = torch.tensor(first, dtype=torch.int64).expand(len(rows), -1)
    return torch.cat([begin, rows], dim=1)


def _check_ids(ids: Tensor, facts: Facts) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < facts.vocab_size:
        raise InputError(
            f"calibration holds token ids from {int(ids.min())} to {int(ids.max())}, and "
            f"{facts.name}'s go from 0 to {facts.vocab_size - 1}: they come from another tokenizer"
        )
