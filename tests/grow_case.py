"""Trees grown over tables: a drafter whose distributions are a function of what came before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.axis import Axis
from accel.runtime.sample import Distribution
from accel.runtime.tree import ROOT, Level, Shape, Tree, grown
from accel.runtime.verify import Chance, Target

from .verify_case import Prefix, World

AXIS = Axis("tree", "accel.runtime.tree")


class Asked:
    """Answers levels by a function of the tokens before, and checks what it is asked."""

    def __init__(self, says: Callable[[Prefix], Any], seen: Prefix = (), levels: int = 99):
        self.says, self.levels = says, levels
        self.before: list[Prefix] = []
        self.seen = seen

    def __call__(self, rows: dict[int, Level]) -> dict[int, Any]:
        (level,) = rows.values()
        assert len(level.tokens) == len(level.parents) > 0
        if not self.before:
            assert level.tokens.tolist() == level.parents.tolist() == [ROOT], (
                "the last committed token comes first"
            )
            new = [self.seen]
        else:
            assert level.parents.min() >= 0 and level.parents.max() < len(self.before), (
                "a node that was not expanded"
            )
            pairs = zip(level.tokens.tolist(), level.parents.tolist(), strict=True)
            new = [(*self.before[parent], token) for token, parent in pairs]
        self.before += new
        assert len(set(self.before)) == len(self.before), "a node is expanded once"
        if not self.levels:
            return {}
        self.levels -= 1
        guesses: Any = [self.says(prefix) for prefix in new]
        odds = all(guess is None or isinstance(guess, Distribution) for guess in guesses)
        return {0: guesses if odds else np.array(guesses)}


def tree_of(shape: Shape, limit: int, asked: Any, draw: Any = None) -> Tree:
    """The tree of one row."""
    return grown({0: shape.grow(limit, draw)}, asked)[0]


def prefixes(tree: Tree, seen: Prefix = ()) -> list[Prefix]:
    """The tokens before each node."""
    return [(*seen, *tree.tokens[list(tree.path(int(p)))].tolist()) for p in tree.parents]


def table(size: int, seed: int, zeros: bool = False) -> Callable[[Prefix], Distribution]:
    """A drafter's distributions; with `zeros` a part of each vocabulary has none."""

    def says(prefix: Prefix) -> Distribution:
        rng = np.random.default_rng([seed, *prefix])
        weights = np.exp(1.5 * rng.standard_normal(size)).astype(np.float32)
        if zeros:
            weights[rng.random(size) < 0.4] = 0
            weights[rng.integers(size)] = 1.0
        return Distribution(np.arange(size), weights)

    return says


def ranked(says: Callable[[Prefix], Distribution], count: int) -> Callable[[Prefix], Sequence[int]]:
    """The same in order only; -1 where there are fewer."""

    def order(prefix: Prefix) -> Sequence[int]:
        weights = says(prefix).weights
        best = [t for t in np.argsort(-weights, kind="stable").tolist() if weights[t] > 0][:count]
        return best + [-1] * (count - len(best))

    return order


@dataclass
class Grown(World):
    """A world whose trees are grown."""

    shape: Any = None
    limit: int = 3

    def round(self, rule: Any, parents: Prefix, seen: Prefix, chance: Chance) -> Prefix:
        def says(prefix: Prefix) -> Distribution:
            return self._once(
                "guess", prefix, lambda p: Distribution(np.arange(self.size), self.q(p))
            )

        draw = rule.drawing(self.sampler, chance)
        tree = tree_of(self.shape.begin(), self.limit, Asked(says, seen), draw)
        logits = np.stack(
            [
                self.logits(p)
                for p in [seen, *(self._after(tree, n, seen) for n in range(len(tree)))]
            ]
        )
        verdict = rule(Target(tree, logits, np.array(seen, np.int64), self.sampler), chance)
        return (*(int(tree.tokens[node]) for node in verdict.path), verdict.token)

    @staticmethod
    def _after(tree: Tree, node: int, seen: Prefix) -> Prefix:
        return (*seen, *tree.tokens[list(tree.path(node))].tolist())
