"""The text that parts are measured and trained on: the user's, or the one that comes with accel."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from accel.ir.errors import InputError
from accel.ir.tables import Example
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


def example_rows(
    tokenizer: Tokenizer, examples: Iterator[Example], ids: Tensor, length: int, seed: int
) -> Iterator[Batch]:
    """Rows [1,T+1] of at most `length` + 1 tokens, each an example whose sentences lie anywhere in a window of a text's
    tokens; `known` [1,T] is 1 where the answer's tokens come next, and -1 of the facts. Raises InputError.
    """
    rng = random.Random(seed)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    first = [i for i in tokenizer.encode("") if i >= 0]
    for example in examples:
        hidden = [(encode(f"\n{t}\n"), t in example.facts) for t in example.facts + example.others]
        rng.shuffle(hidden)
        asked, answer = encode(f"\n{example.question}"), encode(example.answer)
        room = length + 1 - sum(len(t) for t, _ in hidden) - len(asked) - len(answer) - len(first)
        if room < 0:
            raise InputError(
                f"an example has {length + 1 - room} tokens without a text around it; give length={length - room}"
            )
        start = rng.randrange(len(ids) - room)
        around = ids[start : start + room].tolist()
        cuts = [0, *sorted(rng.randint(0, room) for _ in hidden)]
        row, marks = list(first), [0.0] * len(first)
        for begin, end, (tokens, fact) in zip(cuts, cuts[1:], hidden, strict=False):
            row += [*around[begin:end], *tokens]
            marks += [0.0] * (end - begin) + [-1.0 if fact else 0.0] * len(tokens)
        row += [*around[cuts[-1] :], *asked, *answer]
        marks += [0.0] * (room - cuts[-1] + len(asked) - 1) + [1.0] * len(answer)
        yield torch.tensor([row]), torch.tensor([marks])
