"""The text that parts are measured and trained on: the user's, or the one that comes with accel."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from accel.ir.errors import InputError
from accel.runtime.inputs.text import Tokenizer

Batch = tuple[Tensor, Tensor]  # rows [B,T+1], and which tokens can be predicted [B,T]


def text_ids(tokenizer: Tokenizer, text: Path | None, length: int) -> Tensor:
    """The tokens of a text file, or of accel's own text. Raises InputError: it cannot be read, or has too few."""
    name = "accel's own text" if text is None else str(text)
    try:
        own = files("accel").joinpath("reference", "calibration.txt")
        found = (own if text is None else text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {name}: {error}; give a UTF-8 text, text=…") from error
    ids = torch.tensor(tokenizer.encode(found, special=False), dtype=torch.int64)
    if len(ids) < length + 2:
        raise InputError(
            f"{name} has {len(ids)} tokens; give text=… of more than {length + 1} tokens, or a smaller length=…"
        )
    return ids


def text_rows(ids: Tensor, length: int, rows: int, seed: int) -> Iterator[Batch]:
    """Windows of a text, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - length - 1, (rows,), generator=generator).tolist()
        yield torch.stack([ids[s : s + length + 1] for s in starts]), torch.ones(rows, length)
