"""Axis: the shape of drafts. And the token tree that a drafter proposes and verification reads, with the
distribution that each token was sampled from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.ir.invariants import Invariant, Method
from accel.runtime.inputs.ints import Ints, as_ints
from accel.runtime.sample import Distribution
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost

__all__ = [
    "NONE",
    "ROOT",
    "Base",
    "Draw",
    "Growth",
    "Guesses",
    "Level",
    "Shape",
    "Siblings",
    "Tree",
    "grown",
    "without",
]

ROOT = -1  # the last committed token: the parent of the first drafted ones


class Siblings(Enum):
    """How two or more children of a node came about; the value is what an error prints."""

    APART = "drawn without replacement"  # in their order; some of them may be chosen
    INDEPENDENT = "drawn independently"  # all of one distribution
    CHOSEN = "chosen"  # none is drawn


@dataclass(frozen=True, eq=False)
class Tree:
    """Drafted tokens; a chain is a tree, and N = 0 is a plain step.

    tokens [N]; parents [N]: the node before each, lower than its own index, or ROOT. Siblings stand in
    the order in which they were drawn. `q` [M,V], V or fewer columns: what tokens were really drawn
    from, each row with the drafter's temperature and filters in it and a sum of 1; `rows` [N]: which
    of them each node was drawn from, -1 where it was not drawn but chosen (an argmax, a look-up); by
    default row i for node i, and -1 without `q`. Siblings were drawn without replacement, or each from
    its whole row if `replacement`. Then `draws` [D] names the nodes in the order of drawing, one as often as it was
    drawn, by default each once: chains that begin alike are a trie. Raises InputError where the parts do not fit.
    """

    tokens: Ints
    parents: Ints
    q: npt.NDArray[np.floating] | None = None
    rows: Ints | None = None
    replacement: bool = False
    draws: Ints | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _line(self.tokens, "tokens", self.tokens))
        object.__setattr__(self, "parents", _line(self.parents, "parents", self.tokens))
        self._check_form()
        self._check_rows()

    @classmethod
    def chain(cls, tokens: Any, q: npt.NDArray[np.floating] | None = None) -> Tree:
        """Tokens [N] that follow each other, drawn from the rows of q [N,V]."""
        tokens = as_ints(tokens, "tree: tokens")
        return cls(tokens, np.arange(tokens.size) - 1, q)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> Ints:
        """[N]; 1 for the children of the root."""
        depths = np.zeros(len(self) + 1, np.int64)
        for node, parent in enumerate(self.parents):
            depths[node] = 1 + depths[parent]  # ROOT reads the last element, which stays 0
        return depths[:-1]

    def head(self, count: int) -> Tree:
        """Its first `count` nodes; parents and earlier siblings come first."""
        rows = None if self.q is None else self._drawn[:count]
        draws = None if self.draws is None else self.draws[self.draws < count]
        return Tree(
            self.tokens[:count], self.parents[:count], self.q, rows, self.replacement, draws
        )

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_]:
        """What each token of the call [last committed, *tokens] sees of it, [N+1,N+1]: its ancestors
        and itself.
        """
        mask = np.eye(len(self) + 1, dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            mask[node + 1] |= mask[parent + 1]
        return mask

    def children(self, node: int) -> Sequence[int]:
        """The nodes after a node or ROOT, in the order in which they were drawn, one as often as it was."""
        return self._children.get(node, ())

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from below the root to this one; of ROOT, none."""
        path = []
        while node != ROOT:
            path.append(node)
            node = int(self.parents[node])
        return tuple(reversed(path))

    @cached_property
    def siblings(self) -> Mapping[Siblings, int]:
        """The ways in which siblings came about, each with the second child of the first node that it holds for."""
        found: dict[Siblings, int] = {}
        for nodes in self._children.values():
            if len(nodes) > 1:
                drawn = self._drawn[nodes] >= 0
                whole = Siblings.INDEPENDENT if self.replacement and drawn.all() else Siblings.APART
                found.setdefault(whole if drawn.any() else Siblings.CHOSEN, nodes[1])
        return found

    @cached_property
    def branch(self) -> int | None:
        """The first node that does not follow the one before it; None in a chain."""
        found = np.flatnonzero(self.parents != np.arange(len(self)) - 1)
        return int(found[0]) if found.size else None

    def law(self, node: int) -> Distribution:
        """What a node's token was drawn from, given its earlier siblings; that token alone where it was
        chosen. Raises InputError for a row of q that is no distribution.
        """
        row = int(self._drawn[node])
        if self.q is None or row < 0:
            return Distribution(self.tokens[node : node + 1], np.ones(1), random=False)
        siblings = () if self.replacement else self.children(int(self.parents[node]))
        tried = self.tokens[[s for s in siblings if s < node]]
        whole = Distribution(self._ids, self.q[row])
        if not (abs(whole.total - 1) < 1e-3 and whole.weights.min() >= 0):  # NaN is not near
            raise InputError(
                f"tree: row {row} of q is not a distribution: its sum is {whole.total:.6g}, its minimum "
                f"{whole.weights.min():.6g}; give the probabilities that node {node} was sampled from"
            )
        return without(whole, tried) if tried.size else whole

    @cached_property
    def _ids(self) -> Ints:
        """The tokens of q's columns."""
        return np.arange(0 if self.q is None else self.q.shape[1])

    @cached_property
    def _drawn(self) -> Ints:
        """The row of q of each node, [N]."""
        if self.rows is not None:
            return _line(self.rows, "rows", self.tokens)
        return np.arange(len(self)) if self.q is not None else np.full(len(self), -1)

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node in range(len(self)) if self.draws is None else self.draws.tolist():
            children.setdefault(int(self.parents[node]), []).append(node)
        return children

    def _check_form(self) -> None:
        """Every parent before its child, every token an id, no token twice below one parent."""
        wrong = np.flatnonzero((self.parents < ROOT) | (self.parents >= np.arange(len(self))))
        if wrong.size:
            node = int(wrong[0])
            raise InputError(
                f"tree: node {node} has parent {self.parents[node]}; a parent comes before its child: "
                f"give one of {ROOT} (the last committed token) to {node - 1}"
            )
        wrong = np.flatnonzero(self.tokens < 0)
        if wrong.size:
            raise InputError(
                f"tree: node {wrong[0]} has token {self.tokens[wrong[0]]}; ids are 0 or more"
            )
        if self.draws is not None:
            self._check_draws(as_ints(self.draws, "tree: draws"))
        if self.replacement:
            return
        for nodes in self._children.values():
            first: dict[int, int] = {}
            for node in nodes:
                token = int(self.tokens[node])
                if (other := first.setdefault(token, node)) != node:
                    raise InputError(
                        f"tree: siblings {other} and {node} both hold token {token}; merge them, or "
                        "set replacement = True if they were sampled with replacement"
                    )

    def _check_draws(self, draws: Ints) -> None:
        """Every node is drawn, one that was chosen once."""
        object.__setattr__(self, "draws", draws)
        if not self.replacement:
            raise InputError(
                "tree: draws are of siblings that were drawn with replacement; leave draws out, or set "
                "replacement = True"
            )
        if draws.ndim != 1 or (draws < 0).any() or (draws >= len(self)).any():
            raise InputError(
                f"tree: draws {draws.tolist()} are no list of nodes; give each of the {len(self)} nodes as often as it "
                "was drawn"
            )
        counts = np.bincount(draws, minlength=len(self))
        wrong = np.flatnonzero((counts < 1) | ((self._drawn < 0) & (counts > 1)))
        if wrong.size:
            node = int(wrong[0])
            why = "but it was chosen" if counts[node] else "but it is there"
            raise InputError(
                f"tree: draws hold node {node} {counts[node]} times, {why}; give each node as often as it was drawn, "
                "and once what was chosen"
            )

    def _check_rows(self) -> None:
        """Every drawn node has a row of q, and the row has a column for its token."""
        rows, q = self._drawn, self.q
        if q is not None and (q.ndim != 2 or q.dtype.kind != "f"):
            raise InputError(
                f"tree: q is {q.dtype} {list(q.shape)}; give float probabilities [rows, vocabulary]"
            )
        count, width = (0, 0) if q is None else q.shape
        wrong = np.flatnonzero((rows < -1) | (rows >= count))
        if wrong.size:
            raise InputError(
                f"tree: node {wrong[0]} was sampled from row {rows[wrong[0]]} of q, which has {count} "
                "rows; give each sampled node its row, and -1 for all others"
            )
        wrong = np.flatnonzero((rows >= 0) & (self.tokens >= width))
        if wrong.size:
            raise InputError(
                f"tree: node {wrong[0]} holds token {self.tokens[wrong[0]]}, but q has columns for "
                f"0..{width - 1}; give the distribution that it was sampled from"
            )


def without(law: Distribution, tried: Ints) -> Distribution:
    """What the next sibling is drawn from: a law over a whole vocabulary, 0..n-1, without the tokens tried
    so far; where they were all that it had, even over the others (Sequoia, arXiv:2402.12374).
    """
    tried = tried[tried < law.tokens.size]
    for weights in (law.weights.copy(), np.ones(law.tokens.size)):
        weights[tried] = 0
        if weights.any():
            break
    return Distribution(law.tokens, weights)


def _line(value: Any, name: str, like: Any) -> Ints:
    """Integers [N], as many as the tokens."""
    line = as_ints(value, f"tree: {name}")
    if line.ndim != 1 or line.size != np.size(like):
        raise InputError(
            f"tree: {name} has shape {list(line.shape)}; give one number for each token, [{np.size(like)}]"
        )
    return line


NONE = Tree.chain([])  # no draft


@dataclass(frozen=True, eq=False)
class Level:
    """Nodes that a drafter is to expand together: to say what may follow each.

    A growth numbers the nodes that it has expanded in the order in which it asked, from 0: the last committed
    token, which it asks for first, alone (`LEVEL`). tokens [n]; parents [n]: the number of the node that each
    follows. So they are the columns of a draft model's calls, and `parents` is their tree.
    """

    tokens: Ints
    parents: Ints


LEVEL = Level(np.array([ROOT]), np.array([ROOT]))

# What may follow each node of a level: a distribution each, of which a node's children are drawn or, where tokens are
# chosen, whose size only says how likely each is, and None where nothing follows; or tokens [n,k], the best first, -1
# where there are no more.
Guesses = Sequence[Distribution | None] | Ints
# Gives a level and takes guesses, or None: no more come, it ends with what it has.
Growth = Generator[Level, Guesses | None, Tree]
Draw = Callable[[Distribution], int]  # a token of it, as `Chance.draw`


class Shape(ABC):
    """Grows the trees of one row, from its prompt to its end; it may remember what became of them."""

    def read(self, seen: Ints) -> None:  # noqa: B027
        """The tokens [n] of the row, behind which the next tree grows, a view, not to be kept. A drafter that gives
        distributions says it before each tree.
        """

    @abstractmethod
    def grow(self, limit: int, draw: Draw | None = None) -> Growth:
        """A tree of at most `limit` (0 or more) nodes. Children are drawn from a node's distribution as the method
        declares (`Base.siblings`); without `draw` they are chosen, the likeliest first (the lower id among equals): see
        `verify.Base.drawing`. No token is drafted that has no probability. It may ask for nothing.
        """

    def observe(self, tree: Tree, path: Sequence[int]) -> None:  # noqa: B027
        """What became of a tree: the nodes that stand, from below the root on."""


class Base(Method, ABC):
    """A method: a frozen dataclass whose fields are its options, shared by all rows."""

    branches: ClassVar[bool] = True  # False: gives chains only
    siblings: ClassVar[Siblings] = (
        Siblings.APART
    )  # how, where there is a `draw`; CHOSEN: it never draws
    # Whether tokens that were drawn may be left out for later ones. No length may end such a draft by what was drawn:
    # which tokens stay in it would depend on what they are.
    drops: ClassVar[bool] = False

    @property
    def breaks(self) -> frozenset[Invariant]:
        if not self.branches:
            return frozenset()
        apart = {Invariant.EXCHANGEABLE_SIBLINGS} if self.siblings is Siblings.APART else set()
        return frozenset({Invariant.CHAINS, *apart})

    @abstractmethod
    def begin(self, cost: RoundCost = unmeasured_cost, level: float = 0.0) -> Shape:
        """For a new row; a method that remembers nothing is its own. `cost`: of the call that checks a tree of so
        many nodes; `level`: of a level of the drafter, in plain steps too.
        """


def grown(
    growths: Mapping[int, Growth],
    expand: Callable[[dict[int, Level]], Mapping[int, Guesses | Level]],
) -> dict[int, Tree]:
    """The trees of rows that grow together: `expand` gets the level of each row that has one, and gives their guesses.
    A row that is missing in its answer ends with what it has; one that gets its level back waits, and is asked again.
    """
    trees: dict[int, Tree] = {}
    asked: dict[int, Level] = {}

    def further(row: int, guesses: Guesses | None) -> None:
        try:
            asked[row] = growths[row].send(guesses)
        except StopIteration as end:
            trees[row] = end.value

    for row in growths:
        further(row, None)
    while asked:
        found, waiting, asked = expand(asked), asked, {}
        for row in waiting:
            answer = found.get(row)
            if isinstance(answer, Level):
                asked[row] = answer
            else:
                further(row, answer)
    return {row: trees[row] for row in growths}
