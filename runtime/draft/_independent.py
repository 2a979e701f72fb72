"""Drafters that are independent heads: one call says all of a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.ir.invariants import Invariant
from accel.ir.taps import FINAL
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.draft._beside import CHAIN, choice
from accel.runtime.draft._by_levels import ByLevels
from accel.runtime.draft._head import RELIES, built, head_folder
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Distribution
from accel.runtime.speculation.guard import steps_of
from accel.runtime.speculation.independent import IndependentFollower
from accel.runtime.tree import Tree


class Independent(ByLevels):
    """All nodes of a level have one law, as far as the tokens before do not matter to a row's sampler."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.probes, self.opening = False, 0.0
        self._laws: dict[tuple[int, int], Distribution | None] = {}

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        self._laws = {}
        return super().draft(limits, more)

    def law(self, row: int, logits: Logits, seen: Ints) -> Distribution | None:
        key = row, seen.size
        if key in self._laws:
            return self._laws[key]
        found = super().law(row, logits, seen)
        if self.rows[row].sampler.choices(logits[None]) is not None:
            self._laws[key] = found
        return found


class LooksBack(Independent):
    """It looks back where all rows are greedy: what the target computed for the newest tokens is kept."""

    def __init__(self, follower: IndependentFollower, rows: Sequence[Row], *args: Any):
        super().__init__(follower, rows, *args)
        self._heads = follower
        self.probes = all(row.sampler.greedy for row in rows)

    def probe(self, rows: Sequence[int]) -> Sequence[tuple[int, int]]:
        """See Drafters: one call says all drafts, each of which begins where the one before it ended."""
        seen = {i: self.rows[i].seen for i in rows}
        known = {i: self.rows[i].prompt.size for i in rows}
        found, drafts = self._heads.past(seen, known), list[tuple[int, int]]()
        for i, (first, said) in found.items():
            place = first
            while place < seen[i].size:
                drafts.append(self._chain(i, said[place - first], place))
                place += drafts[-1][1] + 1
        return drafts

    def _chain(self, i: int, said: Any, place: int) -> tuple[int, int]:
        """How many tokens a chain by these logits [D,V] would have had from a row's token number `place` on, and how
        many of them stand.
        """
        seen, stood = self.rows[i].seen, 0
        for line in said[:CHAIN, : self._vocab]:
            if place + stood == seen.size:
                return stood, stood
            end = place + stood
            if choice(self.rows[i].sampler, line, seen[:end]) != seen[end]:
                return stood + 1, stood
            stood += 1
        return stood, stood


@dataclass(frozen=True)
class IndependentHead(Base):
    """`path`, `weights`: as of `eagle3`."""

    path: str = ""
    weights: str = "int8"

    embeds = head = independent = True
    asks = {"tree": "chain"}
    provides = frozenset({Invariant.PROBABILITIES})
    relies = RELIES

    def draft_folder(self) -> Path | None:
        return head_folder(self.path, self.use)

    def taps(self, layers: int) -> Sequence[str]:
        return (FINAL,)

    def open(self, session: Any, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        model, head = built(self, context)
        count, cost = len(rows), 0.0
        if context.costs is not None:  # a draft in one call
            cost = steps_of(model.costs, count, context.costs, count) / head.independent
        follower = IndependentFollower(model, session, count, head)
        return LooksBack(follower, rows, context, session.vocab_size, cost)
