"""Models whose calls may be trees of guesses; and such trees."""

from unittest.mock import patch

import numpy as np

import accel
from accel.compiler import optimize as building
from accel.compiler.assemble import assemble
from accel.passes.state.trees import Trees
from accel.runtime.tree import Tree

PARENTS = [-1, 0, 0, 1, 1, 2, 3]  # of the tokens of a tree; the first hangs on what is cached
FORKS = (  # of drafted nodes: branches, a chain, and siblings only
    [-1, -1, 0, 0, 1, 3, 3, 6],
    [-1, 0, 1, 2],
    [-1, -1, -1],
)


def with_trees(model, recipe="base", **options):
    """What accel.optimize makes of a recipe that asks for trees."""

    def planned(recipe):
        plan = assemble(recipe)
        plan.passes.append(Trees())
        return plan

    with patch.object(building, "assemble", planned):
        return accel.optimize(model, recipe, **options)


def ancestors(parents: list[int] = PARENTS) -> np.ndarray:
    """What each token of a tree may see of it, bool [T,T]."""
    seen = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen


def paths(parents: list[int] = PARENTS) -> list[list[int]]:
    """The tokens from the root to each token."""
    return [np.flatnonzero(row).tolist() for row in ancestors(parents)]


def call_of(trees: list[Tree], last: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [B,T], tree [B,T,T] and lengths [B] of one call, padded on the right."""
    lengths = np.array([len(t) + 1 for t in trees])
    tokens = np.zeros((len(trees), lengths.max()), np.int64)
    seen = np.repeat(np.eye(lengths.max(), dtype=bool)[None], len(trees), axis=0)
    for b, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        tokens[b, :length] = [last[b], *tree.tokens]
        seen[b, :length, :length] = tree.mask
    return tokens, seen, lengths
