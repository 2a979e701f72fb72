"""Refined block drafts (arXiv:2404.09221): the best paths through what independent heads find likely, by the heads and
by n-grams of the text, in place of the best token of each head.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Distribution
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import LEVEL, ROOT, Base, Draw, Growth, Level, Shape, Siblings
from accel.runtime.tree._nodes import Nodes, likeliest

UNSEEN = 0.01  # of a token that never followed: as if it had so often
Column = Sequence[tuple[int, float]]  # tokens that one head finds likely, and the logarithm of each


@dataclass(frozen=True)
class BpdRescore(Base):
    """The `paths` best of all paths that take one of each head's `width` likeliest tokens, as a trie, as far as the
    limit goes. A path is worth the sum of its tokens' log-probabilities and `alpha` times those of the n-gram model of
    the request's own text (`order`: how many tokens an n-gram has). With `alpha` = 0 and one path it is the chain of
    each head's best. It always chooses.

    For heads that draft independently, as of `bpd` and `medusa`: of other drafters it takes what may follow the
    likeliest chain.
    """

    width: int = option(8, least=1, most=64)
    paths: int = option(4, least=1, most=64)
    alpha: float = option(0.5, least=0)
    order: int = option(2, least=2, most=4)

    lacks = "n-grams of a corpus, and rescoring by a small language model"
    siblings = Siblings.CHOSEN
    relies = frozenset({Invariant.PROBABILITIES})

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        return _Rescored(self)


@dataclass
class Ngrams:
    """How often each token followed those before it in one row's text, which grows."""

    order: int
    text: list[int] = field(default_factory=list)
    _after: dict[tuple[int, ...], Counter[int]] = field(default_factory=dict)

    def read(self, seen: Ints) -> None:
        """Let the text be these tokens [n], which begin with those of before."""
        before = self.order - 1
        for token in seen[len(self.text) :].tolist():
            if len(self.text) >= before:
                self._after.setdefault(tuple(self.text[-before:]), Counter())[token] += 1
            self.text.append(token)

    def log(self, state: tuple[int, ...], token: int) -> float:
        """The logarithm of a token's probability after the last ones, up to a sum that all tokens share."""
        found = self._after.get(state)
        if found is None:
            return math.log(UNSEEN)
        return math.log((found[token] + UNSEEN) / (found.total() + 1))


def best_paths(
    columns: Sequence[Column], ngrams: Ngrams, alpha: float, count: int
) -> list[tuple[float, tuple[int, ...]]]:
    """The `count` best paths of one token of each column, and what each is worth, the best first; among equals the
    lower tokens. A dynamic programme: of all that end in the same tokens only the best can go on.
    """
    before = ngrams.order - 1
    states: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]] = {
        tuple(ngrams.text[-before:]): [(0.0, ())]
    }
    for column in columns:
        found: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]] = {}
        for state, ones in states.items():
            for token, score in column:
                gain = score + (alpha * ngrams.log(state, token) if alpha else 0.0)
                further = [(value - gain, (*path, token)) for value, path in ones]
                found.setdefault((*state, token)[-before:], []).extend(further)
        states = {state: heapq.nsmallest(count, ones) for state, ones in found.items()}
    best = heapq.nsmallest(count, chain.from_iterable(states.values()))
    return [(-value, path) for value, path in best]


class _Rescored(Shape):
    def __init__(self, method: BpdRescore):
        self._method, self._ngrams = method, Ngrams(method.order)

    def read(self, seen: Ints) -> None:
        self._ngrams.read(seen)

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        columns, level = list[Column](), LEVEL
        while len(columns) < limit and (guesses := (yield level)) is not None:
            (guess,) = guesses
            if guess is None:
                break
            assert isinstance(guess, Distribution), "assembled with a drafter of ranks"
            tokens, odds = likeliest(guess, self._method.width)
            columns.append(list(zip(tokens, np.log(odds).tolist(), strict=True)))
            level = Level(np.array(tokens[:1]), np.array([len(columns) - 1]))
        nodes, places = Nodes(), dict[tuple[int, ...], int]()
        how = self._method
        for _, path in best_paths(columns, self._ngrams, how.alpha, how.paths):
            for depth in range(1, len(path) + 1):
                if path[:depth] not in places and len(nodes.tokens) < limit:
                    parent = places.get(path[: depth - 1], ROOT)
                    (places[path[:depth]],) = nodes.add(parent, [path[depth - 1]])
        return nodes.tree()
