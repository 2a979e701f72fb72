"""Texts -> vectors: batches by length, pooled as the model says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.embedding import Embedding
from accel.ir.errors import InputError
from accel.ir.facts import Facts
from accel.runtime.call import Logits
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.prompts import as_count
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.session.session import Session

Vectors = npt.NDArray[np.float32]
_MOST = 1 << 13  # tokens of a call, padding included
_SMALL = 1e-12  # of a vector's length, as torch's normalize has it


def embedding_of(facts: Facts) -> Embedding:
    """How the model makes vectors. Raises InputError where it makes text."""
    if facts.embedding is None:
        raise InputError(
            f"{facts.name} makes text, not vectors; build it again with pooling=mean, or give an embedding model"
        )
    return facts.embedding


def pairs(
    first: str, texts: Sequence[str], facts: Facts, tokenizer: Tokenizer | None
) -> list[Ints]:
    """The token ids [n] of a text with each of others, for a model that compares two. Raises InputError."""
    how = embedding_of(facts).pairs
    if how is None or tokenizer is None:
        why = "has no tokenizer" if how is not None else "gives a vector for each text"
        raise InputError(f"{facts.name} {why}; give a cross-encoder to compare texts")
    found = []
    for text in texts:
        ids, types = tokenizer.encode_pair(first, text)
        found.append(np.array(ids, np.int64) + how.offset * np.array(types, np.int64))
    return found


def check_dimensions(dimensions: Any, width: int) -> int:
    """How many numbers of a vector are wanted; None: all. Raises InputError."""
    return width if dimensions is None else as_count(dimensions, "dimensions", 1, width)


def embedded(
    texts: Sequence[Ints],
    facts: Facts,
    opened: Callable[[int], Session],
    dimensions: int | None = None,
    before: Callable[[], None] = lambda: None,
) -> Vectors:
    """The vectors [n,E] of texts, each token ids [n] that were checked; `dimensions`: only so many numbers of each, as
    Matryoshka models are trained for (arXiv:2205.13147), brought to length 1 again. `opened`: an empty session of so
    many rows. `before`: called before each batch; what it raises ends the work. Raises InputError.
    """
    how = embedding_of(facts)
    size = check_dimensions(dimensions, how.width)
    found = np.zeros((len(texts), size), np.float32)
    for rows in batches([one.size for one in texts], facts.max_batch):
        before()
        lengths = np.array([texts[i].size for i in rows])
        tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
        for line, i in zip(tokens, rows, strict=True):
            line[: texts[i].size] = texts[i]
        with opened(len(rows)) as session:
            given = session.run(tokens, lengths, last_only=how.pooling == "last")
        found[rows] = pooled(given, lengths, how.pooling)[:, :size]
    if how.pairs is not None and how.pairs.sigmoid:
        found[:] = 1 / (1 + np.exp(-found))
    if how.normalize or size < how.width:
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), _SMALL)
    return found


def pooled(vectors: Logits, lengths: Ints, pooling: str) -> Vectors:
    """One vector [B,E] of those [B,T,E] of each row's `lengths` [B] tokens; padding has 0, and T is 1 for "last"."""
    if pooling == "mean":
        counts = lengths[:, None].astype(np.float32)
        means: Vectors = np.divide(vectors.sum(1, dtype=np.float32), counts, dtype=np.float32)
        return means
    return vectors[:, 0]


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Which texts run together, the longest first: at most so many rows, and `_MOST` tokens with padding."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    at = 0
    while at < len(order):
        rows = max(1, min(most, _MOST // lengths[order[at]]))
        yield order[at : at + rows]
        at += rows
