"""ADED (arXiv:2407.12021): a table of what follows two tokens, which adapts to the text, and a tree of drafts that a
search of it visits most.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf, log, sqrt
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from accel.ir.axis import option
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.draft import Base, Drafter
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.speculation.texts import check_room
from accel.runtime.speculation.trigrams import FEW, NEXT, PAIR, Adaptive, Trigrams
from accel.runtime.tree import ROOT, Tree

WINDOW = 16  # newest tokens that the table adapts to before each draft
HORIZON = 4  # states of a search's path, the root's among them
C1, C2 = 32.0, 8.0  # how much a search explores


@dataclass(frozen=True)
class Aded(Base):
    """`corpus`: a folder from `tools/datastore.py --trigrams`, which a build copies into the artifact; empty: what
    follows in the prompt. Before each draft what followed in the newest 16 tokens weighs `step` more, up to `cap`.

    Of `simulations` walks from the newest two tokens the `choices` most visited paths are drafted, each with its
    heaviest successor, at most `nodes` tokens. `shared`: a loaded model's requests adapt one table of up to `bytes`;
    the oldest pairs are given up. Its published reward reads another pair's weights; the path's own are summed here.

    The walks are in Python and take a few milliseconds.
    """

    corpus: str = ""
    step: float = option(0.04, least=0)
    cap: float = option(3.0, above=0)
    simulations: int = option(150, least=1, most=10_000)
    choices: int = option(24, least=1, most=512)
    nodes: int = option(64, least=1, most=512)
    shared: bool = False
    bytes: int = option(16 << 20, least=0)

    files = ("corpus",)
    breaks = frozenset({Invariant.CHAINS})

    def store(self, facts: Facts, tokenizer: Tokenizer | None) -> Trigrams | Adaptive | None:
        base = None
        if self.corpus:
            digest = "" if tokenizer is None else tokenizer.digest
            folder = Path(self.corpus).expanduser()
            base = Trigrams.open(folder, "draft.aded: corpus", facts.vocab_size, digest)
        if not self.shared:
            return base
        size = PAIR + NEXT * (FEW if base else 1)
        check_room("aded", self.bytes, size, facts.max_context)
        return Adaptive(self.bytes, base)

    def begin(self, prompt: Ints, store: Any = None) -> Drafter:
        table = store if isinstance(store, Adaptive) else Adaptive(self.bytes, store)
        if not self.corpus:
            tokens = prompt.tolist()
            three = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))
            two = Counter(zip(tokens[:-1], tokens[1:-1], strict=False))
            for (first, second, after), times in three.items():
                table.suppose(first, second, after, times / two[first, second])
        return _Row(self, table)


@dataclass
class _Row(Drafter):
    of: Aded
    table: Adaptive
    rng: Random = field(default_factory=lambda: Random(0))

    def draft(self, seen: Ints, limit: int) -> Tree:
        of, newest = self.of, seen[-WINDOW:].tolist()
        if of.step:
            for first, second, after in zip(newest, newest[1:], newest[2:], strict=False):
                self.table.add(first, second, after, of.step, of.cap)
        if len(newest) < 2:
            return Tree.chain([])
        found = searched(self.table, newest[-2], newest[-1], of.simulations, self.rng)
        return drafted(self.table, newest[-2:], found, of.choices, min(limit, of.nodes))


class Node:
    """A token, the weight of its edge, the visits and the sum of their rewards; below: its children, once asked for."""

    __slots__ = ("below", "rewards", "token", "visits", "weight")

    def __init__(self, token: int, weight: float):
        self.token, self.weight = token, weight
        self.visits, self.rewards = 0, 0.0
        self.below: list[Node] | None = None


def searched(
    table: Adaptive, first: int, second: int, simulations: int, rng: Random, explore: bool = True
) -> Node:
    """The root of a tree search from two tokens: each walk goes down by value, takes a new node, goes on by chance to
    the horizon, and tells the nodes of its path 1 and the sum of its weights.
    """
    root = Node(second, 0.0)
    for _ in range(simulations):
        path, before = [root], first
        fresh = False
        while len(path) < HORIZON and not fresh:
            node = path[-1]
            if node.below is None:
                node.below = [Node(*one) for one in table.find(before, node.token)]
                fresh = True
            if not node.below:
                break
            before = node.token
            path.append(_best(node, explore))
        reward = 1 + sum(node.weight for node in path)
        pair, left = (before, path[-1].token), HORIZON - len(path)
        while left and (after := table.find(*pair)):
            token, weight = rng.choices(after, [weight for _, weight in after])[0]
            reward += weight
            pair, left = (pair[1], token), left - 1
        for node in path:
            node.visits += 1
            node.rewards += reward
    return root


def _best(node: Node, explore: bool) -> Node:
    """The child to walk to: one that was not visited, the heaviest first, or that of the largest value."""
    assert node.below
    more = (C1 + log((node.visits + C2 + 1) / C2)) * sqrt(node.visits) if explore else 0.0
    best, most = node.below[0], -inf
    for child in node.below:
        if not child.visits:
            return child
        value = child.rewards / child.visits + more * child.weight / (1 + child.visits)
        if value > most:
            best, most = child, value
    return best


def drafted(table: Adaptive, last: list[int], root: Node, choices: int, nodes: int) -> Tree:
    """The most visited paths below a root, of equals those of fewer tokens, each with its heaviest successor, as a tree
    of at most `nodes` tokens. last [2]: the tokens that were searched from.
    """
    paths, open_ = list[tuple[int, int, list[int]]](), [(root, list[int]())]
    while open_:
        node, path = open_.pop(0)
        for child in node.below or ():
            if child.visits:
                below = [*path, child.token]
                paths.append((-child.visits, len(below), below))
                open_.append((child, below))
    paths.sort(key=lambda one: one[:2])
    tree = dict[tuple[int, int], int]()  # (parent, token) -> node
    for _, _, path in paths[:choices]:
        after = table.find(*[*last, *path][-2:])
        parent = ROOT
        for token in path + [token for token, _ in after[:1]]:
            key = parent, token
            if key not in tree and len(tree) == nodes:
                break
            parent = tree.setdefault(key, len(tree))
    return Tree(
        np.array([token for _, token in tree], np.int64),
        np.array([parent for parent, _ in tree], np.int64),
    )
