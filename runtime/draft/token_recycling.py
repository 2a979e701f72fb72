"""Token Recycling (arXiv:2408.08696): draft trees from a matrix of the most likely successors of each token,
which is updated from the logits of all drafted tokens, also rejected ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import picked
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session
from accel.runtime.speculation.guard import round_costs
from accel.runtime.tree import ROOT, Guesses, Level, Shape, Tree, grown
from accel.runtime.tree._nodes import top
from accel.runtime.verify import Verdict

Matrix = npt.NDArray[np.int32]  # [V,followers], the likeliest first; -1: none


@dataclass(frozen=True)
class TokenRecycling(Base):
    """`followers`: successors kept per token, the most likely ones at its last occurrence. Each row has its own matrix,
    int32 [V,followers] (512 KB for a vocabulary of 16384), so drafts depend only on the request. It is
    initialised from the
    prompt, the newest successor first; the paper's is empty at first and shared between requests.
    """

    followers: int = option(8, least=1, most=64)

    asks = {"tree": "static"}

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        matrices = [follow(row.prompt_text, session.vocab_size, self.followers) for row in rows]
        cost = round_costs(context.costs, session.batch)
        return _Recycled(rows, matrices, [context.methods["tree"].begin(cost) for _ in rows])


@dataclass
class _Recycled(Drafters):
    rows: Sequence[Row]
    matrices: list[Matrix]
    shapes: list[Shape]
    drafted: dict[int, Tree] = field(default_factory=dict)
    joins = free = True

    def join(self, other: Self) -> None:
        self.matrices += other.matrices
        self.shapes += other.shapes

    def leave(self, order: Ints) -> None:
        self.matrices, self.shapes = picked(self.matrices, order), picked(self.shapes, order)
        self.drafted = {}

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        for i, limit in limits.items():
            expand = partial(self._expand, int(self.rows[i].seen[-1]))
            self.drafted.update(grown({i: self.shapes[i].grow(limit)}, expand))
        return {i: self.drafted[i] for i in limits}

    def observe(
        self, row: int, tree: Tree, verdict: Verdict, logits: npt.NDArray[np.float32]
    ) -> None:
        tokens = np.concatenate([self.rows[row].seen[-1:], tree.tokens])
        recycle(self.matrices[row], tokens, logits, [0, *(node + 1 for node in verdict.path)])
        if len(tree) and tree is self.drafted.get(row):
            self.shapes[row].observe(tree, verdict.path)

    def _expand(self, last: int, levels: Mapping[int, Level]) -> Mapping[int, Guesses]:
        found = {
            i: self.matrices[i][np.where(v.tokens == ROOT, last, v.tokens)]
            for i, v in levels.items()
        }
        return {i: tokens.astype(np.int64) for i, tokens in found.items()}


def follow(prompt: Ints, vocabulary: int, followers: int) -> Matrix:
    """What follows each token in a prompt, the newest first."""
    matrix: Matrix = np.full((vocabulary, followers), -1, np.int32)
    pairs, last = np.unique(
        prompt[-2::-1] * vocabulary + prompt[:0:-1], return_index=True
    )  # the newest is met first
    order = np.lexsort((last, pairs // vocabulary))
    first, second = pairs[order] // vocabulary, pairs[order] % vocabulary
    places = np.arange(first.size) - first.searchsorted(first)
    few = places < followers
    matrix[first[few], places[few]] = second[few]
    return matrix


def recycle(
    matrix: Matrix, tokens: Ints, logits: npt.NDArray[np.float32], path: Sequence[int]
) -> None:
    """Put the likeliest tokens of each row of logits [N,V] behind its token [N]. Of several rows of one token the last
    counts, which is the deepest in a tree; before all those of the path that stands.
    """
    found = top(logits, matrix.shape[1])
    matrix[tokens, : found.shape[1]] = found
    matrix[tokens[path], : found.shape[1]] = found[path]
