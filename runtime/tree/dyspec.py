"""DySpec (arXiv:2410.11744): a dynamic token tree, grown where the draft probabilities predict the most
accepted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.sample import Distribution
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost
from accel.runtime.tree import LEVEL, ROOT, Base, Draw, Growth, Level, Shape, Tree
from accel.runtime.tree._nodes import Nodes, drawn, likeliest


@dataclass(frozen=True)
class Dyspec(Base, Shape):
    """`threshold`: minimum value of a node; `depth`: maximum number of levels, each a call of the drafter.
    The nodes with the
    largest values are kept: for chosen nodes the product of the probabilities on their path; for sampled
    nodes the probability that verification reaches them, which is fixed before they are sampled.

    `temperature`: applied to the probabilities of chosen nodes. A greedy target agrees with the drafter's
    most likely token more often than the draft probabilities suggest.
    """

    threshold: float = option(0.02, least=0, below=1)
    depth: int = option(8, least=1, most=64)
    temperature: float = option(0.6, above=0, most=1)

    drops = True
    relies = frozenset({Invariant.PROBABILITIES})

    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        return self

    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        found, level, expanded = _Found(limit, self.threshold, 1 / self.temperature, draw), LEVEL, 0
        open_ = [ROOT] if limit else []
        for _ in range(self.depth):
            if not open_ or (guesses := (yield level)) is None:
                break
            number = {node: expanded + i for i, node in enumerate(open_)}
            expanded += len(open_)
            first = len(found.nodes.tokens)
            for node, guess in zip(open_, guesses, strict=True):
                if guess is not None:
                    assert isinstance(guess, Distribution), "assembled with a drafter of ranks"
                    found.expand(node, guess)
            open_ = [node for node in found.largest() if node >= first]
            tokens, parents = found.nodes.tokens, found.nodes.parents
            level = Level(
                np.array([tokens[n] for n in open_]), np.array([number[parents[n]] for n in open_])
            )
        return found.tree()


@dataclass
class _Found:
    """Nodes so far, each with its value, which is never larger than its parent's or an earlier sibling's, and with
    the share of what stands that goes through it.
    """

    limit: int
    threshold: float
    power: float  # 1 / temperature
    draw: Draw | None
    nodes: Nodes = field(default_factory=Nodes)
    values: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def expand(self, node: int, guess: Distribution) -> None:
        """Add the children that may be kept."""
        share = 1.0 if node == ROOT else self.shares[node]
        if self.draw is None:
            best, probabilities = likeliest(
                Distribution(guess.tokens, guess.weights**self.power), self.limit
            )
            values = share * probabilities
            count = int((values >= self._least()).sum())
            self.values += values[:count].tolist()
            self.shares += values[:count].tolist()
            self.nodes.add(node, best[:count])
            return
        tokens, least, source = list[int](), self._least(), drawn(guess, self.draw)
        while (
            share >= least
            and len(tokens) < self.limit
            and (found := next(source, None)) is not None
        ):
            tokens.append(found[0])
            self.values.append(share)  # before the token is known
            self.shares.append(share * found[1])
            share *= 1 - found[1]
        self.nodes.add(node, tokens, guess)

    def largest(self) -> list[int]:
        """The nodes of the largest values, in rising order; of equal ones those that came first."""
        order = np.argsort(-np.array(self.values), kind="stable")[: self.limit]
        return sorted(order.tolist())

    def tree(self) -> Tree:
        return self.nodes.tree(self.largest())

    def _least(self) -> float:
        """What a node has to be worth to be kept, as far as is known."""
        if len(self.values) < self.limit:
            return self.threshold
        return max(self.threshold, float(np.sort(self.values)[-self.limit]))
