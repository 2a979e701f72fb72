"""What rejection rules share: the test of a drafted token, and what the target still owes after it fails."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from accel.runtime.sample import Distribution
from accel.runtime.tree import ROOT, Tree
from accel.runtime.verify import Chance, Target, Verdict


def ratio(p: Distribution, q: Distribution, token: int) -> float:
    """p(token) / q(token); 0 where q says that the token cannot have been drawn."""
    drawn = q.of(token)
    return p.of(token) / drawn if drawn > 0 else 0.0


def excess(p: Distribution, q: Distribution, scale: float = 1.0) -> npt.NDArray[np.float64]:
    """max(scale p - q, 0) of each of p's tokens, [n]; no other token has any."""
    size = 1 + max(int(p.tokens[-1]), int(q.tokens[-1]))  # a draft may know fewer tokens
    return np.asarray(np.maximum(scale * p.probabilities - q.dense(size)[p.tokens], 0))


def residual(p: Distribution, over: npt.NDArray[np.float64]) -> Distribution:
    """The distribution in proportion to what is over; p where rounding left nothing."""
    return Distribution(p.tokens, over) if over.any() else p


def tried(
    tree: Tree, owed: Distribution, children: Iterable[int], chance: Chance, more: float = 1.0
) -> tuple[int | None, Distribution]:
    """The first of these siblings that stands, each against what those before it left of the target's, times `more`;
    if none does, what is left.
    """
    for child in children:
        law = tree.law(child)
        if chance.accept(more * ratio(owed, law, int(tree.tokens[child]))):
            return child, owed
        owed = residual(owed, excess(owed, law, more))
    return None, owed


def descend(target: Target, chance: Chance, more: float = 1.0) -> Verdict:
    """Recursive rejection: try a node's children in the order of drawing, each against what the target still
    owes, times `more`; go on below the first that stands.
    """
    tree, node, path = target.tree, ROOT, list[int]()
    while True:
        child, owed = tried(tree, target.law(node), tree.children(node), chance, more)
        if child is None:
            return Verdict(tuple(path), chance.draw(owed))
        node = child
        path.append(node)
