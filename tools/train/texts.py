"""What is trained on: rows of a text, or what the bundled model was trained on."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from reference_data import REFERENCE, encode, sources
from rows import Rows, Stage
from tokenizers import Tokenizer
from torch import Tensor

from accel.ir.errors import InputError

MIX = {"library": 4.0, "pass_key": 1.0, "key_value": 2.0, "copy": 1.0, "repeat": 1.0}


def read_text(options: argparse.Namespace) -> Tensor:
    """The tokens of the text. Raises InputError."""
    tokenizer = options.model / "tokenizer.json"
    try:
        text = options.text.read_text(encoding="utf-8")
        ids = torch.tensor(Tokenizer.from_file(str(tokenizer)).encode(text).ids)
    except Exception as error:  # tokenizers raises no other
        raise InputError(f"cannot read {options.text} with {tokenizer}: {error}") from error
    if len(ids) < options.length + 2:
        raise InputError(
            f"{options.text} has {len(ids)} tokens; give a text of more than {options.length + 1}, or a "
            "smaller --length"
        )
    return ids


def text_rows(ids: Tensor, length: int, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of a text, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - length - 1, (rows,), generator=generator).tolist()
        yield torch.stack([ids[s : s + length + 1] for s in starts]), torch.ones(rows, length)


def bundled_rows(length: int, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What the bundled model was trained on, for ever."""
    tokenizer = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    texts = sources()[0]
    np.random.default_rng(seed).shuffle(texts)  # type: ignore[arg-type]
    drawn = Rows(tokenizer, {"library": encode(tokenizer, texts[: len(texts) // 3])}, seed, mix=MIX)
    for step in itertools.count():
        batch = drawn.draw(Stage(rows * length, {length: 1.0}), step)
        yield batch.ids, batch.weights


def rows_of(ids: Tensor | None, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of a text's tokens; none: of what the bundled model was trained on."""
    shape = options.length, options.rows, options.seed
    return bundled_rows(*shape) if ids is None else text_rows(ids, *shape)
