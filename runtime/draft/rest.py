"""REST (arXiv:2311.08252): draft a tree of what most often followed the newest tokens in a datastore of texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.draft import Base, Drafter
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.speculation.datastore import Datastore
from accel.runtime.speculation.texts import GAP, Texts, matches
from accel.runtime.tree import NONE, ROOT, Tree


@dataclass(frozen=True)
class Rest(Base):
    """`datastore`: a folder from `tools/datastore.py`, which a build copies into the artifact; empty: the request's own
    text.

    The longest end of the newest `span` tokens that occurs there, of at least `least`, has up to `hits` occurrences in
    each shard. Of the next `ahead` tokens of each, the `nodes` most frequent beginnings are drafted.
    """

    datastore: str = ""
    span: int = option(16, least=1, most=64)
    least: int = option(2, least=1, most=64)
    hits: int = option(5000, least=1)
    ahead: int = option(10, least=1, most=64)
    nodes: int = option(64, least=1, most=512)

    small = {"least": 1}
    files = ("datastore",)
    breaks = frozenset({Invariant.CHAINS})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.span < self.least:
            raise RecipeError(
                f"{self.full_name}: span is {self.span} and least {self.least}; give span >= least"
            )

    def store(self, facts: Facts, tokenizer: Tokenizer | None) -> Datastore | None:
        if not self.datastore:
            return None
        digest = "" if tokenizer is None else tokenizer.digest
        folder = Path(self.datastore).expanduser()
        return Datastore.open(folder, "draft.rest: datastore", facts.vocab_size, digest)

    def begin(self, prompt: Ints, store: Any = None) -> Drafter:
        return _Row(self, store)


@dataclass(frozen=True)
class _Row(Drafter):
    of: Rest
    store: Datastore | None

    def draft(self, seen: Ints, limit: int) -> Tree:
        tail, nodes = seen[-self.of.span :], min(limit, self.of.nodes)
        tokens: Texts = seen
        if self.store is None:
            ends, lengths = matches(seen[:-1], tail)
            size = int(lengths.max(initial=0))
            places = ends[lengths == size][: self.of.hits]
        else:
            tokens = self.store.tokens
            size, places = self.store.find(tail, self.of.hits)
        return heaviest(tokens, places, self.of.ahead, nodes) if size >= self.of.least else NONE


def heaviest(tokens: Texts, places: Ints, ahead: int, nodes: int) -> Tree:
    """The trie of the next `ahead` tokens from each place: the `nodes` that most of them go through, of equal ones
    those of fewer tokens, then of lower ids. So a node's parent is among them.
    """
    weights, levels, ids, parents = [], [], list[Ints](), list[Ints]()
    node, first = np.full(places.size, ROOT), 0
    for level in range(ahead):
        inside = places + level < tokens.size
        inside[inside] = tokens[places[inside] + level] != GAP
        places, node = places[inside], node[inside]
        if not places.size:
            break
        after = tokens[places + level].astype(np.int64)
        pairs, node, found = np.unique(
            np.stack([node, after], 1), axis=0, return_inverse=True, return_counts=True
        )
        node = first + node.reshape(-1)
        first += len(pairs)
        parents.append(pairs[:, 0])
        ids.append(pairs[:, 1])
        weights.append(found)
        levels.append(np.full(len(pairs), level))
    if not ids:
        return NONE
    order = np.lexsort((np.concatenate(levels), -np.concatenate(weights)))[:nodes]
    place = np.full(first + 1, ROOT)  # of ROOT, the last: ROOT
    place[order] = np.arange(order.size)
    return Tree(np.concatenate(ids)[order], place[np.concatenate(parents)[order]])
