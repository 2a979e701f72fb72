"""Dynamic draft trees (EAGLE-2, arXiv:2406.16858; EAGLE-3, arXiv:2503.01840): the likeliest nodes of each level are
expanded, and of all that were found the likeliest are verified.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.sample import Distribution
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import LEVEL, ROOT, Base, Draw, Growth, Level, Shape, Siblings
from accel.runtime.tree._nodes import Nodes, likeliest


@dataclass(frozen=True)
class EagleTree(Base, Shape):
    """`nodes`: maximum of a tree. `top_k`: children of a node, and nodes that are expanded of a level. `depth`: levels
    below the first one, each a call of the drafter. Tokens are chosen, also where the row samples, so a rule accepts
    each with the target's own probability.
    """

    nodes: int = option(59, least=1, most=512)
    top_k: int = option(10, least=1, most=64)
    depth: int = option(5, least=0, most=64)

    siblings = Siblings.CHOSEN
    relies = frozenset({Invariant.PROBABILITIES})

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        return self

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        nodes, scores, depths = Nodes(), list[float](), list[int]()
        open_, level, expanded = [ROOT] if limit else [], LEVEL, 0
        for step in range(self.depth + 1):
            if not open_ or (guesses := (yield level)) is None:
                break
            number = {node: expanded + i for i, node in enumerate(open_)}
            expanded += len(open_)
            first = len(scores)
            for node, guess in zip(open_, guesses, strict=True):
                if guess is None:
                    continue
                assert isinstance(guess, Distribution), "assembled with a drafter of ranks"
                best, odds = likeliest(guess, self.top_k)
                nodes.add(node, best)
                above = 0.0 if node == ROOT else scores[node]
                scores += (above + np.log(odds)).tolist()
            depths += [step] * (len(scores) - first)
            order = sorted(range(first, len(scores)), key=lambda node: -scores[node])
            open_ = sorted(order[: self.top_k])
            tokens, parents = nodes.tokens, nodes.parents
            level = Level(
                np.array([tokens[n] for n in open_], np.int64),
                np.array([number[parents[n]] for n in open_], np.int64),
            )
        # Of equals the less deep, so that no parent is missing.
        kept = np.lexsort((np.array(depths), -np.array(scores)))
        return nodes.tree(sorted(kept[: min(limit, self.nodes)].tolist()))
