"""SuffixDecoding (arXiv:2411.04975): draft what most often followed the newest tokens, by how often each continuation
occurred in the request and in the outputs of earlier ones, and more of it the longer the match is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from accel.ir.axis import option
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.draft import Base, Drafter
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.speculation.texts import GAP, SIZE, Texts, TextStore, check_room, matches
from accel.runtime.tree import ROOT, Tree


@dataclass(frozen=True)
class SuffixTree(Base):
    """A match of m tokens, up to `depth`, drafts at most `alpha` m + `offset`. A continuation's probability is its
    count over the match's, and at least `min_prob`. The match whose draft has the largest sum of probabilities is
    taken. `tree`: the likeliest continuations as a tree; otherwise the most frequent token at each place.

    `shared`: the outputs of a loaded model's earlier requests are searched too, in up to `bytes` (a token takes 4);
    the oldest are dropped. Each keeps the last `depth` tokens of its prompt, so that its beginning is found. The
    paper's suffix trees count the same occurrences; here the texts are scanned, which takes no time to build.
    """

    alpha: float = option(1.0, least=0)
    offset: float = option(0.0)
    min_prob: float = option(0.1, above=0, most=1)
    depth: int = option(64, least=1, most=1024)
    tree: bool = False
    shared: bool = False
    bytes: int = option(4 << 20, least=0)

    @property
    def breaks(self) -> frozenset[Invariant]:
        return frozenset({Invariant.CHAINS}) if self.tree else frozenset()

    def store(self, facts: Facts, tokenizer: Tokenizer | None) -> TextStore | None:
        if not self.shared:
            return None
        check_room("suffix-tree", self.bytes, SIZE, facts.max_context)
        return TextStore(self.bytes)

    def begin(self, prompt: Ints, store: Any = None) -> Drafter:
        return _Row(self, prompt.size, store)


@dataclass(frozen=True)
class _Row(Drafter):
    of: SuffixTree
    prompt: int
    store: TextStore | None

    def draft(self, seen: Ints, limit: int) -> Tree:
        tail = seen[-self.of.depth :]
        best = _best(self.of, seen, tail, limit)
        if self.store is not None:
            other = _best(self.of, self.store.tokens, tail, limit)
            if other.score > best.score:  # of equals the request's own
                best = other
        return Tree(np.array(best.tokens, np.int64), np.array(best.parents, np.int64))

    def end(self, seen: Ints) -> None:
        if self.store is not None and seen.size > self.prompt:
            self.store.add(seen[max(0, self.prompt - self.of.depth) :])


class _Draft(NamedTuple):
    """A draft, and the sum of its tokens' probabilities."""

    score: float
    tokens: list[int]
    parents: list[int]


def _best(of: SuffixTree, text: Texts, tail: Ints, limit: int) -> _Draft:
    """The draft of the largest score over all matches of the tail's end, the longest match of equals."""
    best = _Draft(0.0, [], [])
    ends, lengths = matches(text, tail)
    order = np.argsort(-lengths, kind="stable")
    ends, lengths = ends[order], lengths[order]
    for last in np.flatnonzero(np.diff(lengths, append=0)).tolist():
        most = int(min(limit, of.alpha * int(lengths[last]) + of.offset + 1e-6))
        if most <= best.score:  # no probability is above 1, and shorter matches draft no more
            break
        found = _grown(text, ends[: last + 1], most, of.min_prob, of.tree)
        if found.score > best.score:
            best = found
    return best


def _grown(text: Texts, ends: Ints, most: int, least: float, tree: bool) -> _Draft:
    """What followed these places: the likeliest continuations first, or the most frequent one alone."""
    score, tokens, parents = 0.0, list[int](), list[int]()
    whole, number = ends.size, 0
    heap: list[tuple[float, int, int, int, Ints]] = []
    node = ROOT
    while True:
        for token, places in _followers(text, ends, first=not tree):
            if places.size >= least * whole:
                heappush(heap, (-places.size / whole, number, node, token, places))
                number += 1
        if not heap or len(tokens) == most:
            return _Draft(score, tokens, parents)
        chance, _, parent, token, ends = heappop(heap)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        score -= chance


def _followers(text: Texts, ends: Ints, first: bool) -> Iterator[tuple[int, Ints]]:
    """The tokens after these places, the most frequent one first and of equals that which came last, each with the
    places behind it. `first`: that one alone.
    """
    ends = ends[ends < text.size]
    if not ends.size:
        return
    after = text[ends]
    if (after == after[0]).all():  # as most are, soon
        if (token := int(after[0])) != GAP:
            yield token, ends + 1
        return
    ids, last, counts = np.unique(after[::-1], return_index=True, return_counts=True)
    order = np.lexsort((last, -counts))
    order = order[ids[order] != GAP]
    for token in ids[order[:1] if first else order].tolist():
        yield token, ends[after == token] + 1
