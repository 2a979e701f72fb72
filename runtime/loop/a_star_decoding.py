"""A*-Decoding (arXiv:2505.13672): the most promising of all texts begun is written on, step by step."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from math import exp
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import Base, check_text
from accel.runtime.loop._branches import branched
from accel.runtime.loop._course import Course, Turn, Way, usable
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class AStarDecoding(Base):
    """A node is a text of whole steps, each up to a line break or `step_tokens` tokens. The node of the least cost g +
    h is taken: where it has ended it is the answer, else `width` next steps are drawn behind it. h is 1 less the
    score of the node's text, by the request's scorer, in one call for all steps; without a scorer by the mean
    probability of the step's tokens. g adds up, over the steps, the score lost (`cost = "regress"`) or won
    ("consistent", by which g + h never falls on the way). Ties go to the longer text, then to the earlier one.

    After `budget` tokens the best node that has ended is the answer, or the best open one as it goes on by itself.
    A greedy request has one step behind each node, which is plain decoding.
    """

    width: int = option(4, least=1, most=64)
    step_tokens: int = option(128, least=1, most=4096)
    budget: int = option(8192, least=1)
    cost: str = option("regress", one_of=("regress", "consistent"))

    small: ClassVar[Mapping[str, Any]] = {"width": 3, "step_tokens": 3}

    grade = "approximate"
    relies = frozenset({Invariant.REWIND})
    takes = frozenset({"scorer"})

    def check(self, tokenizer: Tokenizer | None) -> None:
        check_text(tokenizer, "a-star-decoding: steps are")

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        return branched(session, rows, lambda row: _Nodes(row, self, context))


@dataclass(frozen=True)
class _Node:
    """g: what its steps cost; h: what may be missing."""

    way: Way
    g: float = 0.0
    h: float = 1.0
    steps: int = 0


class _Nodes(Course):
    """The texts begun behind one prompt."""

    def __init__(self, row: Row, method: AStarDecoding, context: DecodeContext):
        super().__init__(row, context)
        self._method = method

    def search(self, way: Way) -> Generator[Turn, None, Row]:
        heap, count, spent = list[tuple[float, int, int, _Node]](), 0, 0
        node = _Node(way)
        while not node.way.ended and spent < self._method.budget:
            if node.way.after is None:
                yield Turn([node.way])
            children = node.way.ways(self._method.width)
            start = len(node.way.logs)
            yield from self.write(children, self._method.step_tokens, "\n")
            spent += sum(len(child.logs) - start for child in children)
            for child in self._scored(node, usable(_distinct(children)), start):
                count += 1
                heapq.heappush(heap, (child.g + child.h, -child.steps, count, child))
            node = heapq.heappop(heap)[-1]
        if not node.way.ended:
            ended = [one for *_, one in sorted(heap, key=lambda one: one[:3]) if one.way.ended]
            if ended:
                return ended[0].way.row
            if node.way.after is None:
                yield Turn([node.way])
            yield from self.write([node.way], node.way.row.left)
            usable([node.way])
        return node.way.row

    def _scored(self, parent: _Node, ways: list[Way], start: int) -> list[_Node]:
        """The nodes of the next steps, whose tokens begin at `start`."""
        scores = self.scores(ways)
        if scores is None:
            scores = [exp(way.mean(start)) for way in ways]
        sign, found = 1 if self._method.cost == "regress" else -1, list[_Node]()
        for way, score in zip(ways, scores, strict=True):
            h = 1 - score
            g = parent.g + max(0.0, sign * (h - parent.h))
            found.append(_Node(way, g, h, parent.steps + 1))
        return found


def _distinct(ways: list[Way]) -> list[Way]:
    """Without those whose tokens another one before has."""
    found = dict[tuple[int, ...], Way]()
    for way in ways:
        found.setdefault(tuple(way.row.tokens), way)
    return list(found.values())
