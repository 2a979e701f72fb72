"""What approximate rules share: of the paths whose tokens all stand, the longest, and of equals the likeliest."""

from __future__ import annotations

from collections.abc import Callable

from accel.runtime.tree import ROOT
from accel.runtime.verify import Chance, Target, Verdict

Stands = Callable[
    [int], float | None
]  # of a token: the logarithm of its probability, up to a sum; None: it falls


def longest(target: Target, chance: Chance, after: Callable[[int], Stands]) -> Verdict:
    """`after`: what may follow a node, or ROOT. Rows behind a token that falls are not read."""
    tree, ranks, tests = target.tree, {ROOT: (0, 0.0)}, dict[int, Stands]()
    for node, (parent, token) in enumerate(
        zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    ):
        if parent not in ranks or target.ends(parent):
            continue
        if parent not in tests:
            tests[parent] = after(parent)
        if (found := tests[parent](token)) is not None:
            length, likelihood = ranks[parent]
            ranks[node] = (length + 1, likelihood + found)
    last = max(ranks, key=lambda node: ranks[node])
    return Verdict(tree.path(last), chance.draw(target.law(last)))
